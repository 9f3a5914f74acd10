"""Runs the process of one package, in the package's own virtual environment, for all callers in
this process. The first request starts it, the next one restarts it if it ends too early, and each
request has a time limit. `programs/miles_serving.py` is the other end of the pipe. Called by the
agents and the environment of these packages."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milescli.agents.foreign.packages import Package
from milescli.core.errors import AgentError
from milescli.workers.frames import JSON
from milescli.workers.guard import guarded
from milescli.workers.worker import CallFailed, Worker

START_TIMEOUT_S = 120.0
"""Time for the imports of the package and of what it loads."""
CLOSE_TIMEOUT_S = 45.0
"""Seconds to clean up (containers, servers) after the last request."""
MAX_LOST = 8
"""Number of times in a row that the process may end; then the run stops."""
_PING_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 5.0
_NOT_PASSED_ON = ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH", "__PYVENV_LAUNCHER__")
_HOSTS: weakref.WeakSet[ForeignHost] = weakref.WeakSet()


class ProcessLost(CallFailed):
    """Reports that the process ended before it replied."""


class ForeignWorker(Worker):
    """Runs a process of a package, below a guard process that ends everything the package
    started."""

    def __init__(
        self, package: Package, *, start: Mapping[str, Any], folders: Sequence[str] = ()
    ) -> None:
        """Start the process. `start`: parameters of its first request; `folders`: further import
        paths of the process and of its children."""
        interpreter = package.interpreter
        environment = {k: v for k, v in os.environ.items() if k not in _NOT_PASSED_ON}
        environment["PATH"] = f"{interpreter.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment["PYTHONPATH"] = os.pathsep.join(folders)
        command = guarded([str(interpreter), str(package.program)])
        super().__init__(command, codec=JSON, env=environment)
        self.started = self.call("start", start)[1]
        """Done once it can be asked; raises ProcessLost where it ends first, or starts too slowly,
        CallFailed with what the package raised."""
        cause = f"the process of {package.name} did not start within {START_TIMEOUT_S:g} s"
        self._bound_start(self.started, START_TIMEOUT_S, cause)

    def call(
        self, method: str, params: Mapping[str, Any]
    ) -> tuple[int, concurrent.futures.Future[Any]]:
        """Send a request; return its number, and the future of its reply. The future raises
        CallFailed with what the package raised, ProcessLost if the process ends."""
        return self.request((method, dict(params)))

    def end(self, cause: str = "it was ended") -> None:
        """End the guard process, which first ends the others, as in Worker."""
        super().end(cause)
        if not self._has_ended.wait(_END_TIMEOUT_S):
            super()._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def _cause_of(self, status: int) -> str:
        return "its process has ended"  # the guard's status says nothing of it

    def _ended_error(self) -> Exception:
        return ProcessLost(self._cause + self.last_printed())


@dataclass(eq=False)
class ForeignHost:
    """Starts a package's process when it is needed. Any thread or event loop may call it."""

    package: Package
    start: Mapping[str, Any]
    """Parameters of `start`, the first request to each new process."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _worker: ForeignWorker | None = None
    _num_lost: int = 0

    def __post_init__(self) -> None:
        if not _HOSTS:
            atexit.register(close_hosts)
        _HOSTS.add(self)

    @property
    def pid(self) -> int | None:
        """Return the id of the guard around the package's process; None if none is running."""
        return self._worker.pid if self._worker is not None else None

    async def call(self, method: str, params: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Return the reply. Raises CallFailed with what the package raised or if it took too long,
        ProcessLost if the process ended, AgentError if the process ends each time."""
        worker = self._ready_worker()
        try:
            await asyncio.shield(asyncio.wrap_future(worker.started))
            number, reply = worker.call(method, params)
            try:
                async with asyncio.timeout(timeout_s):
                    result = await asyncio.wrap_future(reply)
            except TimeoutError:
                await asyncio.to_thread(_give_up, worker, number)
                raise CallFailed(_too_long(method, timeout_s)) from None
            except asyncio.CancelledError:
                worker.cancel(number)
                raise
        except ProcessLost as error:
            raise self._on_lost(worker, error) from None
        self._num_lost = 0
        return result

    def start_now(self) -> ForeignWorker:
        """Return the process once it can take requests. Raises as `call`."""
        worker = self._ready_worker()
        try:
            worker.started.result()  # bounded by the worker itself
        except ProcessLost as error:
            raise self._on_lost(worker, error) from None
        return worker

    def call_now(self, method: str, params: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Call the process like `call`, from a thread."""
        worker = self.start_now()
        try:
            number, reply = worker.call(method, params)
            try:
                result = reply.result(timeout_s)
            except TimeoutError:
                _give_up(worker, number)
                raise CallFailed(_too_long(method, timeout_s)) from None
        except ProcessLost as error:
            raise self._on_lost(worker, error) from None
        self._num_lost = 0
        return result

    def close_input(self) -> None:
        """Close the process's input, so that it begins to clean up; `close` waits for it."""
        if (worker := self._worker) is not None:
            worker.close_input()

    def close(self) -> None:
        """End its process; a later request starts another."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(CLOSE_TIMEOUT_S, cause="it was closed")

    def _ready_worker(self) -> ForeignWorker:
        with self._lock:
            if self._worker is not None and not self._worker.lives:
                self._worker, self._num_lost = None, self._num_lost + 1
            if self._worker is None:
                self.package.require(needed_by=f"`{self.package.use}`")
                self._worker = ForeignWorker(self.package, start=self.start, folders=[os.getcwd()])
                weakref.finalize(self, self._worker.end, "nobody can ask it any more")
            return self._worker

    def _on_lost(self, worker: ForeignWorker, error: ProcessLost) -> Exception:
        """Return the error to raise; count each lost process once. The next request starts one."""
        with self._lock:
            if worker is self._worker:
                self._worker = None
                self._num_lost += 1
        if self._num_lost < MAX_LOST:
            return error
        return AgentError(
            f"the process of {self.package.name} ended {self._num_lost} times in a row",
            why=str(error),
            fix=f"{self.package.interpreter} {self.package.program}   # does it start?",
        )


def _give_up(worker: ForeignWorker, number: int) -> None:
    """Cancel a request, and end the process if its event loop does not answer either."""
    worker.cancel(number)
    try:
        worker.ping().result(_PING_TIMEOUT_S)
    except TimeoutError:
        worker.end(f"its event loop did not come round for {_PING_TIMEOUT_S:g} s")
    except CallFailed:
        return


def close_hosts() -> None:
    """End all processes that this process has started. Idempotent; a later request starts a new
    one."""
    hosts = list(_HOSTS)
    for host in hosts:  # all at once
        host.close_input()
    for host in hosts:
        host.close()


def _too_long(method: str, timeout_s: float) -> str:
    return f"`{method}` did not end within {timeout_s:g} s"
