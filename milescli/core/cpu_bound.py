"""Bounds the CPU time of foreign code that runs in this process, such as a chat template. It counts
the thread's own CPU seconds, so it never fails because the machine is busy or was frozen for a
while."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_CHECK_INTERVAL_S = 0.5


class TooSlow(ValueError):
    """Raised inside code that has used up its CPU time."""


@dataclass(eq=False, slots=True)
class _BoundedCall:
    thread: int
    clock: int
    """Clock of the thread's CPU time."""
    until_s: float
    """Reading of the clock at which the code is stopped."""
    is_stopped: bool = False


_lock = threading.Lock()
_running: list[_BoundedCall] = []
_watcher: threading.Thread | None = None


@contextmanager
def cpu_bound(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the code inside once it has used this many seconds of CPU time. The clock is
    read twice a second, and the code stops at its next Python instruction: one long call into C
    continues."""
    ident = threading.get_ident()
    clock = time.pthread_getcpuclockid(ident)
    one = _BoundedCall(ident, clock, time.clock_gettime(clock) + seconds)
    _watch(one)
    try:
        yield
    finally:
        with _lock:
            _running.remove(one)
            if one.is_stopped:  # if it has not been raised yet, it must not be raised later
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)
    if one.is_stopped:
        raise TooSlow


def _watch(one: _BoundedCall) -> None:
    global _watcher
    with _lock:
        _running.append(one)
        if _watcher is None:
            _watcher = threading.Thread(target=_stop_slow_calls, name="cpu-bound", daemon=True)
            _watcher.start()


def _reset_after_fork() -> None:
    """Reset the state in a fork: it has none of the threads, and perhaps a lock that one of them
    held."""
    global _lock, _watcher
    _lock, _watcher = threading.Lock(), None
    _running.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


def _stop_slow_calls() -> None:
    global _watcher
    while True:
        time.sleep(_CHECK_INTERVAL_S)
        with _lock:
            if not _running:
                _watcher = None
                return
            for one in _running:
                if not one.is_stopped and time.clock_gettime(one.clock) > one.until_s:
                    one.is_stopped = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(one.thread), ctypes.py_object(TooSlow)
                    )
