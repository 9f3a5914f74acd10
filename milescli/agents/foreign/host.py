"""The process of one package, for all who ask it in this process of ours: begun by the first
request, begun again where it ends too early, bounded in each request. Called by the agents and the
environment of these packages."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from milescli.agents.foreign.packages import Package
from milescli.agents.foreign.process import ForeignProcess, ProcessLost
from milescli.core.errors import AgentError
from milescli.workers.worker import CallFailed

START_TIMEOUT_S = 120.0
"""For the imports of the package and of what it loads."""
MAX_LOST = 8
"""Times in a row that the process may end; then the run stops."""
_PING_TIMEOUT_S = 10.0
_HOSTS: weakref.WeakSet[ForeignHost] = weakref.WeakSet()


@dataclass(eq=False)
class ForeignHost:
    """May be asked from any thread, and from any event loop."""

    package: Package
    start: Mapping[str, Any]
    """Parameters of the request `start`, the first that a process of it is asked."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _process: ForeignProcess | None = None
    _started: concurrent.futures.Future[Any] | None = None
    """Of what the process said to `start`."""
    _num_lost: int = 0

    def __post_init__(self) -> None:
        if not _HOSTS:
            atexit.register(close_hosts)
        _HOSTS.add(self)

    @property
    def pid(self) -> int | None:
        """Of the guard around its process; None where there is none now."""
        return self._process.pid if self._process is not None else None

    async def ask(self, method: str, params: Mapping[str, Any], *, timeout_s: float) -> Any:
        """What it replies. Raises CallFailed with what the package raised or that it took too
        long, ProcessLost where the process ended, AgentError where it ends each time."""
        process, started = self._begun()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.shield(asyncio.wrap_future(started))
        except TimeoutError:
            raise self._gave_up(process, f"did not start within {START_TIMEOUT_S:g} s") from None
        except ProcessLost as error:
            raise self._was_lost(process, error) from None
        number, reply = process.request(method, params)
        try:
            async with asyncio.timeout(timeout_s):
                result = await asyncio.wrap_future(reply)
        except TimeoutError:
            process.cancel(number)
            await asyncio.to_thread(self._end_if_silent, process)
            raise CallFailed(_too_long(method, timeout_s)) from None
        except asyncio.CancelledError:
            process.cancel(number)
            raise
        except ProcessLost as error:
            raise self._was_lost(process, error) from None
        self._num_lost = 0
        return result

    def ask_now(self, method: str, params: Mapping[str, Any], *, timeout_s: float) -> Any:
        """As `ask`, for threads."""
        process, started = self._begun()
        try:
            started.result(START_TIMEOUT_S)
        except TimeoutError:
            raise self._gave_up(process, f"did not start within {START_TIMEOUT_S:g} s") from None
        except ProcessLost as error:
            raise self._was_lost(process, error) from None
        number, reply = process.request(method, params)
        try:
            result = reply.result(timeout_s)
        except TimeoutError:
            process.cancel(number)
            self._end_if_silent(process)
            raise CallFailed(_too_long(method, timeout_s)) from None
        except ProcessLost as error:
            raise self._was_lost(process, error) from None
        self._num_lost = 0
        return result

    def hang_up(self) -> None:
        """Its process begins to clean up; `close` waits for it."""
        if (process := self._process) is not None:
            process.hang_up()

    def close(self) -> None:
        """End its process; a later request begins another."""
        with self._lock:
            process, self._process, self._started = self._process, None, None
        if process is not None:
            process.close()

    def _begun(self) -> tuple[ForeignProcess, concurrent.futures.Future[Any]]:
        with self._lock:
            if self._process is not None and not self._process.lives:
                self._process, self._num_lost = None, self._num_lost + 1
            if self._process is None:
                self.package.require(asked_by=f"`{self.package.use}`")
                self._process = ForeignProcess(
                    self.package.interpreter, self.package.program, folders=[os.getcwd()]
                )
                weakref.finalize(self, self._process.end, "nobody can ask it any more")
                self._started = self._process.request("start", self.start)[1]
            assert self._started is not None
            return self._process, self._started

    def _was_lost(self, process: ForeignProcess, error: ProcessLost) -> Exception:
        """What to raise. Counted once for each process; the next request begins another."""
        with self._lock:
            if process is self._process:
                self._process = self._started = None
                self._num_lost += 1
        if self._num_lost < MAX_LOST:
            return error
        return AgentError(
            f"the process of {self.package.name} ended {self._num_lost} times in a row",
            why=str(error),
            fix=f"{self.package.interpreter} {self.package.program}   # does it start?",
        )

    def _gave_up(self, process: ForeignProcess, why: str) -> Exception:
        process.end(f"it {why}")
        return self._was_lost(process, ProcessLost(f"the process of {self.package.name} {why}"))

    def _end_if_silent(self, process: ForeignProcess) -> None:
        """One whose event loop is held up answers nobody."""
        _, pong = process.request("ping", {})
        try:
            pong.result(_PING_TIMEOUT_S)
        except TimeoutError:
            process.end(f"its event loop did not come round for {_PING_TIMEOUT_S:g} s")
        except CallFailed:
            return


def close_hosts() -> None:
    """End all that this process has begun. Idempotent; a later request begins anew."""
    hosts = list(_HOSTS)
    for host in hosts:  # all at once
        host.hang_up()
    for host in hosts:
        host.close()


def _too_long(method: str, timeout_s: float) -> str:
    return f"`{method}` did not end within {timeout_s:g} s"
