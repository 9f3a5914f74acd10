"""Runs the driver of a run as a child of a small process, made by fork before anything heavy is
imported: that process passes signals on and tells how the child ended. `parent` says what it means.

Where both share the foreground of a terminal, its signals reach both, and only those that somebody
sends to this process are passed on. Elsewhere the child has a process group of its own, and all
are. Whoever ends this process by SIGKILL ends the driver, too."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from milescli.core.driver_pipe import Said, heard, speak_into
from milescli.core.silence import is_stopped_process

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG"""
_FROM_TERMINAL = 0x80
"""SI_KERNEL: of a signal that the terminal sent, to all its foreground."""
_SHARED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Passed on in any case."""
_OWN_GROUP = (signal.SIGHUP, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
"""Passed on to a child with a group of its own."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""By which a user ends a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a driver ended."""

    pid: int
    said: Said
    """By itself."""
    code: int
    """Exit code of the process; -N: ended by signal N."""
    stopped_by: int | None
    """The first signal by which the user wanted the end; None: he did not."""


def run_in_child(work: Callable[[], None], *, on_hold: Callable[[int], None]) -> Ended | None:
    """Fork; returns how the child ended. In the child: does `work`, raises what that raises, and
    returns None: it goes the way that a process without a parent would go. Call it on a main thread
    without others. `on_hold` is told the process id of a child that somebody held by SIGSTOP."""
    sys.stdout.flush()
    sys.stderr.flush()
    in_foreground = _is_foreground()
    passed_on = {*_SHARED, *(() if in_foreground else _OWN_GROUP)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*passed_on, signal.SIGCHLD})
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # nobody reads before the end: what does not fit is not said
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_driver(pipe=writing, parent=parent, own_group=not in_foreground, mask=before)
        work()
        return None
    os.close(writing)
    if not in_foreground:
        with suppress(OSError):  # it has done so itself, or ended
            os.setpgid(child, child)
    try:
        code, stopped_by = _wait(child, passed_on, in_foreground=in_foreground, on_hold=on_hold)
        return Ended(pid=child, said=heard(reading), code=code, stopped_by=stopped_by)
    finally:
        os.close(reading)
        # what still came for the child is not for this process
        while signal.sigtimedwait([*passed_on, signal.SIGCHLD], 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_foreground() -> bool:
    for stream in (0, 1, 2):
        with suppress(OSError):
            return os.tcgetpgrp(stream) == os.getpgrp()
    return False


def _be_driver(*, pipe: int, parent: int, own_group: bool, mask: set[signal.Signals]) -> None:
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has just ended, and this process would not be told
        os._exit(1)
    if own_group:
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    speak_into(pipe)


def _wait(
    child: int,
    passed_on: set[signal.Signals],
    *,
    in_foreground: bool,
    on_hold: Callable[[int], None],
) -> tuple[int, int | None]:
    """(exit code, first signal that asked for the end)"""
    stopped_by: int | None = None
    while True:
        came = signal.sigwaitinfo({*passed_on, signal.SIGCHLD})
        number = signal.Signals(came.si_signo)
        if number == signal.SIGCHLD:
            for status in _changes(child):
                if not os.WIFSTOPPED(status):
                    return os.waitstatus_to_exitcode(status), stopped_by
                if os.WSTOPSIG(status) == signal.SIGSTOP:
                    on_hold(child)
            continue
        if number in STOPS and stopped_by is None:
            stopped_by = number
        if not in_foreground or came.si_code != _FROM_TERMINAL:
            with suppress(ProcessLookupError):
                if number in (signal.SIGTSTP, signal.SIGCONT):
                    os.killpg(child, number)
                else:
                    os.kill(child, number)
        if number in STOPS and is_stopped_process(child):  # else it would never hear it
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGCONT)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)


def _changes(child: int) -> Iterator[int]:
    """Wait statuses of the child since the last look: it was stopped, or ended. Orphans are reaped,
    too: in a container this may be the process that inherits them."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == child:
                yield status
            elif pid == 0:
                return
