"""Starts a Ray session, ends its processes as one who signals a whole process group does, and
leaves it. For `test_lost_ray`."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path

from milescli.backends.ray.cluster import Cluster
from tests.plans import PLAN


def main() -> None:
    """To be run as a process group of its own."""
    with tempfile.TemporaryDirectory(prefix="miles-test-", dir="/tmp") as temp_dir:
        cluster = Cluster(address=None, temp_dir=Path(temp_dir), environment={})
        cluster.start(PLAN)
        asyncio.run(cluster.place(PLAN, timeout_s=60))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        cluster.stop()
    print("left")


if __name__ == "__main__":
    main()
