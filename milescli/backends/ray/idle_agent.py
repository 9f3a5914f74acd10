"""Replaces the agent of Ray's dashboard, as nothing is to be served: it writes that into the files
in which Ray expects its ports, and lives as long as the raylet that started it. Ray's own agent
does the same after importing for 0.7 s of a core.

`python -I -S idle_agent.py --node-id=ID --session-dir=FOLDER ...`, with the standard library
alone."""

import os
import sys
import time
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NOT_SERVED = "-1"


def main() -> None:
    """Write the files, then wait for the end of the raylet."""
    raylet = os.getppid()
    given = dict(word.split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
    for port in PORTS:
        path = Path(given["--session-dir"]) / f"{port}_{given['--node-id']}"
        part = path.with_suffix(".part")
        part.write_text(NOT_SERVED, encoding="utf-8")
        part.rename(path)
    while os.getppid() == raylet:
        time.sleep(1.0)


if __name__ == "__main__":
    main()
