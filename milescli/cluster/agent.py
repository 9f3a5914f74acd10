"""What looks after one node of a run where the driver is not: a small Ray actor, sent there by
`resources`, that holds the node's watchdog and finds free ports."""

from __future__ import annotations

from pathlib import Path

from milescli.cluster.watchdog import start_watchdog
from milescli.platform.ports import free_ports

NODE_AGENT = "milescli.cluster.agent:NodeAgent"


class NodeAgent:
    """A watchdog, a folder for temporary files, and ports. Its actor does not carry the run's
    token, so that the watchdog, whose pipe it holds, does not end it with the others. Ray ends it
    when the driver ends, in whatever way; then the pipe closes."""

    def __init__(self, *, token: str, temp_dir: str) -> None:
        """`temp_dir`: what the run's processes have as TMPDIR; made here, and removed by the
        watchdog with the folder above it."""
        folder = Path(temp_dir)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(exist_ok=True)
        self._watchdog = start_watchdog(token=token, scratch_dirs=[folder.parent])

    def free_ports(self, count: int, host: str) -> list[int]:
        """That nobody listens on, on this node."""
        return free_ports(count, host=host)

    def release(self) -> None:
        """Ask for the clean-up of this node, and wait for it."""
        self._watchdog.release()
