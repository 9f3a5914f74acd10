"""Looks after one node of a run other than the driver's: a small Ray actor, started by `resources`,
that holds the node's watchdog and finds free ports."""

from __future__ import annotations

from pathlib import Path

from milescli.cluster.watchdog import start_watchdog
from milescli.platform.ports import free_ports

NODE_AGENT = "milescli.cluster.agent:NodeAgent"


class NodeAgent:
    """Runs a watchdog, owns a folder for temporary files, and reserves ports on a node. Its actor
    does not carry the run's token, so the watchdog, whose pipe it holds, does not end it with the
    others. Ray ends it when the driver ends for any reason; then the pipe closes."""

    def __init__(self, *, token: str, temp_dir: str) -> None:
        """Create `temp_dir`, the TMPDIR of the run's processes; the watchdog removes it with its
        parent folder."""
        folder = Path(temp_dir)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(exist_ok=True)
        self._watchdog = start_watchdog(token=token, scratch_dirs=[folder.parent])

    def free_ports(self, count: int, host: str) -> list[int]:
        """Return free ports of this node."""
        return free_ports(count, host=host)

    def release(self) -> None:
        """Request the clean-up of this node and wait for it."""
        self._watchdog.release()
