"""Ends what somebody stops (SIGSTOP) while a run starts, so that it is started again as what is
killed is. Afterwards `engine_watch` and `rank_watch` see it. Sees this computer alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from milescli.core.concurrency import in_thread
from milescli.core.events import EventBus
from milescli.core.run_processes import processes_of
from milescli.core.silence import Silence, is_stopped_process

_MARKS = ("sglang", "ray::")
"""In the command lines of engines, of the warm process and of what Ray's actors host; what else a
run starts has bounds of its own."""


class StartWatch:
    """Of one attempt, until all has started."""

    def __init__(
        self, token: str, *, silence_s: float, bus: EventBus, is_over: Callable[[], bool]
    ) -> None:
        """`token`: of the run; `silence_s`: see MachineSettings; `is_over`: all has started."""
        self._token, self._silence_s = token, silence_s
        self._bus, self._is_over = bus, is_over
        self._silences = dict[int, Silence]()
        """By process id, of those that are stopped."""

    async def probe(self) -> None:
        """Look once."""
        if self._is_over():
            self._silences.clear()
            return
        held = await in_thread(self._held)
        self._silences = {
            pid: self._silences.get(pid) or Silence(worker=name, bound_s=self._silence_s)
            for pid, name in held.items()
        }
        for pid, silence in self._silences.items():
            silence.look(f"its process {pid} is stopped (SIGSTOP)")
            if news := silence.news(0):
                self._bus.emit(news)
            if silence.is_too_long:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _held(self) -> dict[int, str]:
        """Id -> command, of those that are stopped."""
        stopped = [pid for pid in processes_of(self._token) if is_stopped_process(pid)]
        commands = {pid: _command_of(pid) for pid in stopped}
        return {
            pid: command
            for pid, command in commands.items()
            if any(mark in command for mark in _MARKS)
        }


def _command_of(pid: int) -> str:
    """As people read it: a process's title, or the module that it runs."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has just ended
        return ""
    return line[line.index("-m") + 1] if "-m" in line[:-1] else line[0]
