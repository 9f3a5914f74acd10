"""A reward of the user's in processes of its own: whatever it does (hang in C, block an event loop,
exit, eat memory, print without end) ends at its bound, and costs one process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milescli.core.units import format_bytes
from milescli.rollout.scoring import CallFailed

START_TIMEOUT_S = 120.0
"""Bound on the start of a worker: Python, and the user's imports."""
MAX_PRINTED_BYTES = 8 * 1024**2
"""Between two replies of a worker."""
CALLS_AT_ONCE = 256
"""Of an async reward."""
MAX_WORKERS = 32
"""Of a plain one."""
GROW_AFTER_S = 0.5
"""Plain rewards that compute are done sooner in as many workers as there are cores; where a call
has waited so long, they wait for something, and further workers are begun."""
_TAIL_BYTES = 4096
_LAST_WORDS_S = 0.5
"""For what a worker says where it hangs."""


_PACKAGE = str(Path(__file__).parents[2])


class _Innocent(CallFailed):
    """The worker was ended for what another call did."""


class ProcessReward:
    """A reward, called in worker processes that are started when they are needed. Belongs to one
    event loop; the scorer keeps to `max_concurrency` calls."""

    def __init__(
        self,
        path: str,
        *,
        is_async: bool,
        memory_bytes: int,
        timeout_s: float,
        max_concurrency: int | None = None,
    ) -> None:
        """`path`: import path, which was resolved already; `timeout_s`: what the reward is told,
        where it has `within`; `max_concurrency`: as it says itself."""
        self.__name__ = path
        self._arguments = [path, str(memory_bytes), str(timeout_s)]
        self._memory_bytes = memory_bytes
        most = max_concurrency or CALLS_AT_ONCE
        self._calls_each = min(CALLS_AT_ONCE, most) if is_async else 1
        self._most_workers = 1 if is_async else min(MAX_WORKERS, most)
        self._first_workers = min(max(2, len(os.sched_getaffinity(0))), self._most_workers)
        self._workers: list[_Worker] = []
        self._freed = asyncio.Event()
        self._end = weakref.finalize(self, _end_all, self._workers)

    @property
    def max_concurrency(self) -> int:
        """Calls that make sense at once."""
        return self._most_workers * self._calls_each

    async def score(
        self, *, prompt: str, response: str, label: str | None, timeout_s: float
    ) -> object:
        """What the reward says of one response. Raises CallFailed, or TimeoutError with where it
        was after `timeout_s`."""
        question = {"prompt": prompt, "response": response, "label": label}
        while True:
            try:
                return await self._ask(await self._free_worker(), question, timeout_s)
            except _Innocent:
                continue  # the call that was to blame raises, or gets a worker of its own

    async def _ask(self, worker: _Worker, question: dict[str, Any], timeout_s: float) -> object:
        reply = worker.ask(question)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(reply)
        except TimeoutError:
            where = await asyncio.to_thread(worker.end_and_say_where)
            raise TimeoutError(f"it did not return within {timeout_s:g} s{where}") from None
        except asyncio.CancelledError:
            if self._calls_each == 1:
                worker.end("nobody waits for it any more")
            raise
        finally:
            self._freed.set()

    def close(self) -> None:
        """End all workers."""
        self._end()

    async def _free_worker(self) -> _Worker:
        worker = self._idle_worker()
        while worker is None:
            self._freed.clear()
            has_waited = False
            try:
                async with asyncio.timeout(GROW_AFTER_S):
                    await self._freed.wait()
            except TimeoutError:
                has_waited = True
            worker = self._idle_worker(may_grow=has_waited)
        try:
            await asyncio.shield(asyncio.wrap_future(worker.ready))
        except BaseException:
            worker.give_a_call_back()
            raise
        return worker

    def _idle_worker(self, *, may_grow: bool = False) -> _Worker | None:
        """One that has room for a call, which is taken; else a new one, where there may be."""
        self._workers[:] = [worker for worker in self._workers if worker.lives]
        for worker in self._workers:
            if worker.take_a_call(self._calls_each):
                return worker
        most = self._most_workers if may_grow else self._first_workers
        if len(self._workers) >= most:
            return None
        self._workers.append(_Worker(self._arguments, self._memory_bytes, num_running=1))
        return self._workers[-1]


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()


@dataclass(slots=True)
class _Output:
    """What a worker has printed."""

    tail: bytes = b""
    since_reply: int = 0

    def add(self, piece: bytes) -> bool:
        """Whether it is too much."""
        self.tail = (self.tail + piece)[-_TAIL_BYTES:]
        self.since_reply += len(piece)
        return self.since_reply > MAX_PRINTED_BYTES

    def shown(self) -> str:
        """`; it printed last: ...`, or nothing."""
        text = self.tail.decode("utf-8", "replace").strip()
        return f"; it printed last:\n{text}" if text else ""


@dataclass(eq=False)
class _Worker:
    """One process, and the threads that write to it and read from it: whatever it does, the event
    loop never waits for its pipes."""

    arguments: list[str]
    memory_bytes: int
    num_running: int = 0
    ready: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)

    def __post_init__(self) -> None:
        self._waiting: dict[int, concurrent.futures.Future[object]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._has_ended = False
        self._output, self._cause, self._kind = _Output(), "", CallFailed
        self._failure = CallFailed("it has ended")
        command = [sys.executable, "-m", "milescli.rollout.rewards.worker"]
        self._process = subprocess.Popen(
            [*command, *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        for target in (self._write, self._read_replies, self._read_output, self._bound_start):
            threading.Thread(target=target, name="miles-reward", daemon=True).start()

    @property
    def lives(self) -> bool:
        """Whether it can be asked."""
        return not self._has_ended and not self._cause

    def take_a_call(self, most: int) -> bool:
        """Whether it has room for one more; then it is taken."""
        with self._lock:
            has_room = self.num_running < most
            self.num_running += has_room
            return has_room

    def give_a_call_back(self) -> None:
        """One that was taken and is done, or was never asked."""
        with self._lock:
            self.num_running -= 1

    def ask(self, question: dict[str, Any]) -> concurrent.futures.Future[object]:
        """The reward to come; raises CallFailed through it."""
        reply: concurrent.futures.Future[object] = concurrent.futures.Future()
        with self._lock:
            if self._has_ended:
                reply.set_exception(self._failure)
                return reply
            number = next(self._numbers)
            self._waiting[number] = reply
        self._lines.put(json.dumps({"id": number, **question}).encode() + b"\n")
        return reply

    def end(self, cause: str = "it was ended") -> None:
        """At once, with all processes that it began."""
        self._cause = self._cause or cause
        if not self._has_ended:
            self._kill_group()

    def _kill_group(self) -> None:
        """Only before it is reaped: afterwards its number may be another's."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end_and_say_where(self) -> str:
        """End it; what it was at."""
        self._output.tail = b""
        if not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                # not by send_signal, which would reap it before its group is ended
                os.kill(self._process.pid, signal.SIGUSR1)
        deadline, said = time.monotonic() + _LAST_WORDS_S, b""
        while time.monotonic() < deadline and (not said or said != self._output.tail):
            said = self._output.tail
            time.sleep(0.05)
        self._kind = _Innocent
        self.end("another call of it took too long")
        return _where(said.decode("utf-8", "replace"))

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: its reader says so
            while (line := self._lines.get()) is not None:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                reply = json.loads(line)
            except ValueError:
                self.end(f"it wrote what is no reply: {line[:200]!r}")
                continue
            self._output.since_reply = 0
            if "ready" in reply:
                self.ready.set_result(None)
            elif "refused" in reply:
                what, why = reply["refused"]
                self._cause = f"{what}: {why}"
            else:
                self._settle(reply)
        self._fail_all()

    def _settle(self, reply: dict[str, Any]) -> None:
        with self._lock:
            future = self._waiting.pop(reply["id"], None)
        self.give_a_call_back()
        if future is None or future.cancelled():
            return
        if "error" in reply:
            future.set_exception(CallFailed(self._explained(reply["error"])))
        else:
            future.set_result(reply["reward"])

    def _explained(self, text: str) -> str:
        if "MemoryError" in text:
            text += f"\n(it may take {format_bytes(self.memory_bytes)}: rollout.reward_memory_gib)"
        return text

    def _fail_all(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            self._kill_group()  # what it began, too
        status = self._process.wait()
        self._lines.put(None)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        cause = self._cause or f"its process ended with {how}"
        failure = self._failure = self._kind(cause + self._output.shown())
        with self._lock:
            self._has_ended = True
            waiting, self._waiting = list(self._waiting.values()), {}
        if not self.ready.done():
            self.ready.set_exception(failure)
        for future in waiting:
            if not future.done():
                future.set_exception(failure)

    def _read_output(self) -> None:
        assert self._process.stderr is not None
        while piece := os.read(self._process.stderr.fileno(), 1 << 16):
            if self._output.add(piece):
                self.end(f"it printed more than {format_bytes(MAX_PRINTED_BYTES)} in one call")

    def _bound_start(self) -> None:
        try:
            self.ready.result(timeout=START_TIMEOUT_S)
        except TimeoutError:
            self.end(f"its module was not imported within {START_TIMEOUT_S:g} s")
        except Exception:
            return  # told to who waits for it


def _where(said: str) -> str:
    """The user's frames of the main thread, of faulthandler's dump, innermost last."""
    frames = [line.strip() for line in said.splitlines() if line.strip().startswith("File ")]
    own = [line for line in frames if _PACKAGE not in line and "<frozen" not in line]
    return "".join(f"\n  {line}" for line in reversed(own[:6])) if own else ""
