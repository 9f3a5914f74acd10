"""Supervises a run: stop signals, the flag by which the loop notices them, probes that find the
first cause when a process dies, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from milescli.core.concurrency import in_thread
from milescli.core.errors import MilesError, NodesJoined, Stopped, WorkerDied
from milescli.core.events import EventBus
from milescli.core.run_processes import processes_of
from milescli.core.silence import Silence, is_stopped_process
from milescli.runtime.recovery.preemption import Preemption, of_signal
from milescli.runtime.recovery.stops import immediate_end_error, stop_signals

WATCH_EVERY_S = 1.0
CAUSE_GRACE_S = 5.0
"""Seconds, after a failure of the loop, to find a dead process that explains it, on one
computer."""


@dataclass(slots=True)
class StopSignals:
    """Handles stop signals. The first Ctrl-C, SIGTERM or SIGHUP asks the loop to stop at a safe
    point, and to save. A second one ends the work at once, except SIGHUP, since a closed terminal
    may send it several times."""

    on_stop: Callable[[], bool]
    """Asks the loop to stop; returns False if there is nothing to save, so that the first signal
    ends the work at once, too."""
    resume_command: Callable[[], str]
    """Returns the command that continues or starts again, for the error of an immediate end."""
    on_notice: Callable[[Preemption], bool] | None = None
    """Asks the loop to save before this machine is taken away; returns False if there is nothing to
    save. None: a notice is a stop like any other."""
    received: int | None = None
    """Last signal; None if there was none."""
    is_second: bool = False
    """True if there was one before it."""
    _notice: Preemption | None = None
    _main: asyncio.Task[Any] | None = None
    _old: dict[int, Any] = field(default_factory=dict)
    """Previous handlers."""

    @property
    def error(self) -> MilesError:
        """Return the error of work that the signals ended at once."""
        notice = self._notice.why if self._notice is not None and self.received is None else ""
        return immediate_end_error(
            self.received, fix=self.resume_command(), is_second=self.is_second, notice=notice
        )

    def install(self, main: asyncio.Task[Any]) -> None:
        """Install the handlers, which stop `main`."""
        self._main = main
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            self._old[number] = signal.getsignal(number)
            loop.add_signal_handler(number, self._handle, number)

    def remove(self) -> None:
        """Restore the previous signal handlers."""
        loop = asyncio.get_running_loop()
        for number, handler in self._old.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # None: of a library in C
                signal.signal(number, handler)

    def notify(self, notice: Preemption) -> None:
        """Handle a preemption notice: only the first one counts, and none after a stop. A signal
        after it counts as the user's first."""
        if self.received is not None or self._notice is not None or self.on_notice is None:
            return
        self._notice = notice
        if not self.on_notice(notice) and self._main is not None:
            self._main.cancel()

    def _handle(self, number: int) -> None:
        if number == signal.SIGUSR1 and self.on_notice is not None:
            self.notify(of_signal(os.environ))
            return
        if number == signal.SIGHUP and self.received is not None:
            return
        self.is_second, self.received = self.received is not None, number
        if (self.is_second or not self.on_stop()) and self._main is not None:
            self._main.cancel()


Probe = Callable[[], Awaitable[None]]
"""Checks one of our processes; raises WorkerDied if it has ended."""


async def watch(probes: list[Probe]) -> None:
    """Run all probes once a second, until one raises WorkerDied. Never returns otherwise. A slow
    probe does not delay the others: Ray answers late if it is broken."""
    looks: dict[Probe, asyncio.Future[None]] = {}
    try:
        while True:
            for probe in probes:
                if probe not in looks:
                    looks[probe] = asyncio.ensure_future(probe())
            if looks:
                await asyncio.wait(
                    looks.values(), timeout=WATCH_EVERY_S, return_when=asyncio.FIRST_EXCEPTION
                )
            for probe in [probe for probe, look in looks.items() if look.done()]:
                looks.pop(probe).result()
            await asyncio.sleep(WATCH_EVERY_S)
    finally:
        for look in looks.values():
            look.cancel()
        await asyncio.gather(*looks.values(), return_exceptions=True)


async def run_watched(
    work: Coroutine[Any, Any, None],
    probes: list[Probe],
    signals: StopSignals,
    *,
    cause_grace_s: float = CAUSE_GRACE_S,
) -> None:
    """Run `work` while watching; whichever ends first ends both. Raises the error that names the
    first cause.

    A dead process makes others fail as well (lost connections, closed peers): its own WorkerDied is
    preferred.
    """
    main = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(watch(probes))
    signals.install(main)
    try:
        await asyncio.wait({main, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            raise _error_of(watcher) or AssertionError("supervision ended for an unknown reason")
        if main.cancelled():
            raise signals.error
        error = main.exception()
        if error is None:
            return
        if _may_be_symptom(error):
            await asyncio.wait({watcher}, timeout=cause_grace_s)
            if watcher.done() and (cause := _error_of(watcher)):
                raise cause from error
        raise error
    finally:
        signals.remove()
        for task in (main, watcher):
            task.cancel()
        await asyncio.gather(main, watcher, return_exceptions=True)


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _may_be_symptom(error: BaseException) -> bool:
    """Return True if the error may only be a consequence. The user's errors (data, rewards, NaN)
    are causes; lost peers and timeouts may not be."""
    return isinstance(error, WorkerDied | TimeoutError | OSError) or not isinstance(
        error, MilesError
    )


T = TypeVar("T")


class StopFlag:
    """Reports to the loop that the user asked for the end; the loop checks it at safe points."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._joined: NodesJoined | None = None
        self.why = "Ctrl-C, SIGTERM or SIGHUP"
        """Who asked for the end."""
        self.is_after_step = False
        """True if the end comes after the current step, at the latest."""

    @property
    def is_set(self) -> bool:
        """Return True if the end was requested."""
        return self._event.is_set()

    def set(self) -> None:
        """Request the end."""
        self._event.set()

    def set_joined(self, joined: NodesJoined) -> None:
        """Request a restart between two steps."""
        self._joined = joined

    def check(self) -> None:
        """Raise Stopped if the flag is set, NodesJoined if the run must restart with more nodes."""
        if self._event.is_set() or self.is_after_step:
            raise Stopped("stopped on request", why=self.why, fix="miles resume")
        if self._joined is not None:
            raise self._joined

    async def unless_set(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which must change nothing that has to be saved. If the flag
        is set meanwhile, cancel the work and raise Stopped."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.check()
            return task.result()
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)


_MARKS = ("sglang", "ray::")
"""Parts of the command lines of engines, of the warm process and of Ray actors' processes; whatever
else a run starts has its own time limits."""


class StartWatch:
    """Ends processes that are stopped (SIGSTOP) while a run starts, so that they are restarted like
    killed ones. Later, `EngineWatch` and `RankWatch` watch them. Works on this computer alone, for
    one attempt, until everything has started."""

    def __init__(
        self, token: str, *, silence_s: float, bus: EventBus, is_over: Callable[[], bool]
    ) -> None:
        """Set up the watch. `token`: of the run; `silence_s`: see MachineSettings; `is_over`:
        returns True once everything has started."""
        self._token, self._silence_s = token, silence_s
        self._bus, self._is_over = bus, is_over
        self._silences = dict[int, Silence]()
        """Process id -> silence, of stopped processes."""

    async def probe(self) -> None:
        """Check the processes once."""
        if self._is_over():
            self._silences.clear()
            return
        stopped = await in_thread(self._stopped_processes)
        self._silences = {
            pid: self._silences.get(pid) or Silence(worker=name, bound_s=self._silence_s)
            for pid, name in stopped.items()
        }
        for pid, silence in self._silences.items():
            silence.observe(f"its process {pid} is stopped (SIGSTOP)")
            if news := silence.warning(0):
                self._bus.emit(news)
            if silence.is_too_long:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _stopped_processes(self) -> dict[int, str]:
        """Return process id -> command of the stopped processes."""
        stopped = [pid for pid in processes_of(self._token) if is_stopped_process(pid)]
        commands = {pid: _command_of(pid) for pid in stopped}
        return {
            pid: command
            for pid, command in commands.items()
            if any(mark in command for mark in _MARKS)
        }


def _command_of(pid: int) -> str:
    """Return a process's name for people: its title, or the module that it runs."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has just ended
        return ""
    return line[line.index("-m") + 1] if "-m" in line[:-1] else line[0]
