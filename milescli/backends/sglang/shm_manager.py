"""torch's shm manager: the process beside a trainer rank that removes shared host memory when the
last process that holds it ends. It cannot be started again within a process: a rank that has lost
it must end, and another begins. Called by the channel that shares host memory."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from milescli.core.run_processes import state_of
from milescli.core.stacks import is_stopped_process

NAME = "torch_shm_manager"
HELD_S = 5.0
"""So long it may be stopped."""
LOOK_EVERY_S = 0.1


class ShmManager:
    """Of this process, which has one at most."""

    def __init__(self) -> None:
        self._pid: int | None = None
        """Since it was there."""

    def find(self) -> None:
        """Something was shared: torch has started it. What is not found is not looked after."""
        if self._pid is None:
            self._pid = next(children(os.getpid()), None)

    def require(self) -> None:
        """Ends this process by SIGKILL, with the reason in its log, where the manager has died or
        is held: readers would die of it, or wait for it for ever."""
        if self._pid is None:
            return
        deadline = time.monotonic() + HELD_S
        while (is_held := is_stopped_process(self._pid)) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        if not is_held and state_of(self._pid) not in (None, "Z"):
            return
        how = "is stopped" if is_held else "has died"
        print(f"{NAME} (process {self._pid}) {how}: no memory can be shared", file=sys.stderr)
        sys.stderr.flush()
        if is_held:
            os.kill(self._pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def children(parent: int) -> Iterator[int]:
    """Process ids of managers that this process has started, zombies too."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # it has just ended
                continue
            name, _, rest = stat.partition("(")[2].rpartition(")")
            if name == NAME[:15] and int(rest.split()[1]) == parent:
                yield int(entry.name)


SHM_MANAGER = ShmManager()
