"""Runs trainer ranks as real processes over gloo on loopback. `run_world` starts them; the file itself is what each rank executes.
Many cases share one start-up: a world of a given size runs them one after the other."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 480


def agree_on_port(folder: Path, rank: int, name: str) -> int:
    """A free port of loopback, found by rank 0 when it is needed: one found earlier may be taken by then."""
    file = folder / f"port-{name.replace(' ', '_')}"
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        file.with_suffix(".part").write_text(str(port))
        file.with_suffix(".part").rename(file)
        return port
    deadline = time.monotonic() + TIMEOUT_S
    while not file.exists():
        assert time.monotonic() < deadline, f"rank 0 named no port for {name}"
        time.sleep(0.01)
    return int(file.read_text())


def run_world(size: int, cases: list[dict], folder: Path) -> dict[str, object]:
    """Case name -> what its function returned on rank 0. `cases`: name, call (a function of `cases.py`), and its arguments."""
    folder.mkdir(parents=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    ranks = []
    for rank in range(size):
        log = (folder / f"rank{rank}.log").open("wb")
        command = [sys.executable, __file__, str(folder), str(rank), str(size)]
        ranks.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT))
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while any(process.poll() is None for process in ranks):
            failed = any(process.poll() not in (None, 0) for process in ranks)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    logs = {rank: (folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(size)}
    assert all(process.returncode == 0 for process in ranks), "\n".join(f"rank {rank}: {text}" for rank, text in logs.items())
    return pickle.loads((folder / "results.pkl").read_bytes())


def main() -> None:
    """One rank."""
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    from tests.backends.megatron import cases

    results = {}
    for case in json.loads((folder / "cases.json").read_text()):
        name, call = case.pop("name"), case.pop("call")
        port = agree_on_port(folder, rank, name)
        results[name] = getattr(cases, call)(rank=rank, size=size, port=port, **case)
    if rank == 0:
        (folder / "results.pkl").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main()
