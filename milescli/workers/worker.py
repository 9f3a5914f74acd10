"""A process for code of the user's: whatever it does (hang in C, block an event loop, exit, eat
memory, print without end) ends at its bound, with the place where it was, and costs one process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from milescli.core.units import format_bytes
from milescli.workers.child import Failed, read_frame
from milescli.workers.frames import Outbox

START_TIMEOUT_S = 120.0
"""Bound on the start of a process: Python, and the user's imports."""
MAX_PRINTED_BYTES = 8 * 1024**2
"""Between two replies of a process."""
MEMORY_BYTES = 8 * 1024**3
"""Of a process, where nothing else is said."""
_TAIL_BYTES = 4096
_LAST_WORDS_S = 3.0
"""For what a process says where it hangs."""
_DRAIN_S = 2.0
"""For what an ended process has printed: its pipe has no other end, unless it began a daemon."""
_PACKAGE = str(Path(__file__).parents[1])

OnAsk = Callable[[int, Any], None]
"""Told of what a call asks for while it runs: (number of the question, what)."""


class CallFailed(Exception):
    """One call of the user's code in another process gave nothing; says why, for the user."""


class Innocent(CallFailed):
    """The process was ended for what another call did."""


@dataclass(slots=True)
class _Output:
    """What a process has printed."""

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


class Reply(Protocol):
    """Who is told what came of a call, by the thread that reads: a future of threads is one."""

    def set_running_or_notify_cancel(self) -> bool:
        """Whether anybody still waits."""

    def set_result(self, value: Any) -> None:
        """It returned."""

    def set_exception(self, error: BaseException) -> None:
        """It raised, or its process has ended."""


@dataclass(slots=True)
class _Pending:
    """A call that has no reply yet."""

    reply: Reply
    on_ask: OnAsk | None


@dataclass(eq=False)
class UserProcess:
    """One process, and the threads that write to it and read from it: whatever it does, nobody
    waits for its pipes."""

    target: str
    """`module:function` of ours, called there for each call; `async def`: many at once."""
    memory_bytes: int = MEMORY_BYTES
    memory_key: str = ""
    """Of the recipe, which says how much memory it may take."""
    shows_output: bool = False
    """What it prints goes to our standard error; else only errors show the last of it."""
    ready: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)
    num_running: int = 0

    def __post_init__(self) -> None:
        self._waiting: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._frames = Outbox()
        self._has_ended = False
        self._has_said_all = threading.Event()
        self._output, self._cause, self._kind = _Output(), "", CallFailed
        self._failure: CallFailed = CallFailed("it has ended")
        self._frames.put((sys.path, self.target))
        begun: concurrent.futures.Future[subprocess.Popen[bytes]] = concurrent.futures.Future()
        _in_thread(lambda: self._live(begun))
        self._process = begun.result()
        for work in (self._write, self._read_output, self._bound_start):
            _in_thread(work)

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

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

    def call(
        self, *args: Any, on_ask: OnAsk | None = None, **options: Any
    ) -> tuple[int, concurrent.futures.Future[Any]]:
        """Its number, and what the target will return. Through the future it raises CallFailed
        with the traceback, or what MilesError the target raised."""
        reply: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            number = next(self._numbers)
            if self._has_ended:
                reply.set_exception(self._failure)
                return number, reply
            self._waiting[number] = _Pending(reply, on_ask)
        self._frames.put((number, "call", (args, options)))
        return number, reply

    def call_many(self, asked: Sequence[tuple[Reply, tuple[Any, ...]]]) -> None:
        """Of a function that is marked `in_threads`: [(who is told, arguments)], in one frame."""
        with self._lock:
            has_ended = self._has_ended
            numbers = [next(self._numbers) for _ in asked]
            if not has_ended:
                pending = (_Pending(reply, None) for reply, _ in asked)
                self._waiting.update(zip(numbers, pending, strict=True))
        if has_ended:
            for reply, _ in asked:
                reply.set_exception(self._failure)
            return
        calls = zip(numbers, asked, strict=True)
        self._frames.put([(number, "call", (args, {})) for number, (_, args) in calls])

    def answer(self, number: int, question: int, value: Any) -> None:
        """What call `number` has asked for; an exception is raised there."""
        self._frames.put((number, "answer", (question, value)))

    def cancel(self, number: int) -> None:
        """Of an async target: nobody waits for this call any more."""
        with self._lock:
            self._waiting.pop(number, None)
        self._frames.put((number, "cancel", None))

    def ping(self) -> concurrent.futures.Future[Any]:
        """Done as soon as the event loop of an async target gets round to it."""
        reply: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._has_ended:
                reply.set_exception(self._failure)
                return reply
            number = next(self._numbers)
            self._waiting[number] = _Pending(reply, None)
        self._frames.put((number, "ping", None))
        return reply

    def end(self, cause: str = "it was ended") -> None:
        """At once, with all processes that it began."""
        self._cause = self._cause or cause
        if not self._has_ended:
            self._kill_group()

    def close(self, grace_s: float = 0.0) -> None:
        """End it; `grace_s`: to end by itself, with what the user's code does at exit."""
        if grace_s and self.lives:
            self._frames.end()
            deadline = time.monotonic() + grace_s
            while not self._has_ended and time.monotonic() < deadline:
                time.sleep(0.02)
        self.end()

    def end_and_say_where(self) -> str:
        """End it for what one call does; where that was."""
        where = self.where_it_is()
        self._kind = Innocent
        self.end("another call of it took too long")
        return where

    def where_it_is(self) -> str:
        """The user's lines that it is at, each on one of its own; empty where that is not to be
        had. What it printed before is forgotten."""
        self._output.tail, self.shows_output = b"", False
        if not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                # not by send_signal, which would reap it before its group is ended
                os.kill(self._process.pid, signal.SIGUSR1)
        deadline, said = time.monotonic() + _LAST_WORDS_S, b""
        while time.monotonic() < deadline and (not said or said != self._output.tail):
            said = self._output.tail
            time.sleep(0.05)
        return _where(said.decode("utf-8", "replace"))

    def _live(self, begun: concurrent.futures.Future[subprocess.Popen[bytes]]) -> None:
        """From begin to end: the kernel ends the process with the thread that began it."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "milescli.workers.child", str(self.memory_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
            )
        except OSError as error:
            begun.set_exception(error)
            return
        begun.set_result(self._process)
        self._read_replies()

    def _kill_group(self) -> None:
        """Only before it is reaped: afterwards its number may be another's."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self) -> None:
        assert self._process.stdin is not None
        pipe = os.dup(self._process.stdin.fileno())
        self._process.stdin.close()
        self._frames.run(pipe)

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        pipe: BinaryIO = self._process.stdout  # type: ignore[assignment]
        while True:
            try:
                raw = read_frame(pipe)
                if raw is None:
                    break
                told = pickle.loads(raw)
                replies = told if isinstance(told, list) else [told]
                assert all(len(reply) == 3 for reply in replies), "it says something else"
            except Exception as error:  # the user's code has found our pipe, or made what no other
                # process can: whatever it is, no reply can be had from here on
                self.end(f"it wrote what is no reply: {error}")
                break
            self._output.since_reply = 0
            for reply in replies:
                self._take(*reply)
        self._fail_all()

    def _take(self, number: int, kind: str, value: Any) -> None:
        """What the process says."""
        if kind == "ready":
            self.ready.set_result(None)
        elif kind == "ask":
            pending = self._waiting.get(number)
            if pending is not None and pending.on_ask is not None:
                pending.on_ask(*value)
        else:
            self._settle(number, value)

    def _settle(self, number: int, value: Any) -> None:
        with self._lock:
            pending = self._waiting.pop(number, None)
        if pending is None or not pending.reply.set_running_or_notify_cancel():
            return
        if isinstance(value, Failed):
            pending.reply.set_exception(value.error or CallFailed(self._explained(value.told)))
        else:
            pending.reply.set_result(value)

    def _explained(self, text: str) -> str:
        if "MemoryError" in text:
            key = f": {self.memory_key}" if self.memory_key else ""
            text += f"\n(it may take {format_bytes(self.memory_bytes)}{key})"
        return text

    def _fail_all(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            self._kill_group()  # what it began, too
        status = self._process.wait()
        self._frames.end()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        cause = self._cause or f"its process ended with {how}"
        self._has_said_all.wait(_DRAIN_S)
        failure = self._failure = self._kind(cause + self._output.shown())
        with self._lock:
            self._has_ended = True
            waiting, self._waiting = list(self._waiting.values()), {}
        if not self.ready.done():
            self.ready.set_exception(failure)
        for pending in waiting:
            if pending.reply.set_running_or_notify_cancel():
                pending.reply.set_exception(failure)

    def _read_output(self) -> None:
        assert self._process.stderr is not None
        while piece := os.read(self._process.stderr.fileno(), 1 << 16):
            if self._output.add(piece):
                self.end(f"it printed more than {format_bytes(MAX_PRINTED_BYTES)} in one call")
            elif self.shows_output:
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(piece.decode("utf-8", "replace"))
                    sys.stderr.flush()
        self._has_said_all.set()

    def _bound_start(self) -> None:
        try:
            self.ready.result(timeout=START_TIMEOUT_S)
        except TimeoutError:
            self.end(f"its module was not imported within {START_TIMEOUT_S:g} s")
        except Exception:
            return  # told to who waits for it


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="miles-user-code", daemon=True).start()


def _where(said: str) -> str:
    """The user's frames of the main thread, of faulthandler's dump, innermost last. Others come
    before it."""
    said = said.rpartition("Current thread")[2]
    frames = [line.strip() for line in said.splitlines() if line.strip().startswith("File ")]
    own = [line for line in frames if _PACKAGE not in line and "<frozen" not in line]
    return "".join(f"\n  {line}" for line in reversed(own[:6])) if own else ""
