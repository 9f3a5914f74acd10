"""Runs the child side of a UserWorker: `python -m milescli.workers.child BYTES` reads messages,
calls one function of miles for each, which calls the user's, and writes its result. A plain
function runs one call at a time; an async one, or a plain one marked `in_threads`, runs all at
once."""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import itertools
import os
import pickle
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Any, BinaryIO

from milescli.core import user_code
from milescli.core.errors import MilesError
from milescli.core.user_code import user_traceback
from milescli.workers.child_threads import LeadingThreads
from milescli.workers.frames import PICKLE, Message
from milescli.workers.guard import end_with_parent


@dataclass(frozen=True, slots=True)
class _Replies:
    """Writes replies to the parent; belongs to one thread."""

    pipe: BinaryIO

    def send(self, number: int, kind: str, value: Any) -> None:
        """Send one message. A value that cannot be pickled becomes an error."""
        try:
            frame = PICKLE.pack((number, kind, value))
        except Exception as error:  # a lambda, a generator, ... of the user's
            text = f"it returned {value!r:.200}, which no other process can be given: {error}"
            frame = PICKLE.pack((number, "error", text))
        self._write(frame)

    def send_many(self, messages: list[Message]) -> None:
        """Send several messages in one frame; if one cannot be pickled, send each by itself."""
        try:
            frame = PICKLE.pack(messages)
        except Exception:
            for message in messages:
                self.send(*message)
        else:
            self._write(frame)

    def _write(self, frame: bytes) -> None:
        self.pipe.write(frame)
        self.pipe.flush()


@dataclass(slots=True)
class ParentRequests:
    """Lets an async call send requests to the parent while it runs."""

    number: int
    send: Callable[[int, str, Any], None]
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def request(self, what: Any) -> Any:
        """Return the parent's answer, or raise what it raised."""
        question = next(self.numbers)
        answer = self.answers[question] = asyncio.get_running_loop().create_future()
        self.send(self.number, "ask", (question, what))
        try:
            return await answer
        finally:
            del self.answers[question]

    def set_answer(self, question: int, value: Any) -> None:
        """Set the answer to a question."""
        answer = self.answers.get(question)
        if answer is None or answer.done():
            return
        if isinstance(value, Exception):
            answer.set_exception(value)
        else:
            answer.set_result(value)


parent_requests: contextvars.ContextVar[ParentRequests] = contextvars.ContextVar("parent_requests")
"""The ParentRequests of the current call."""


def main(memory_bytes: int) -> None:
    """Serve calls until standard input closes, or the parent process is gone."""
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the run, which ends this process
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # works inside C, too
    replies = _Replies(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what the user's code prints must not look like a reply
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    user_code.in_user_process = True
    source = sys.stdin.buffer
    if (first := PICKLE.read(source)) is None:
        return
    paths, target = pickle.loads(first)
    sys.path[:] = paths
    module, _, name = target.partition(":")
    function = getattr(import_module(module), name)
    replies.send(-1, "ready", None)
    if getattr(function, "in_threads", False):
        # nothing else was sent before "ready": all of it is still in the pipe
        LeadingThreads(
            function, source.fileno(), reply=replies.send_many, failed=_error_to_send
        ).run()
        return
    if iscoroutinefunction(function):
        asyncio.run(_serve_all_at_once(function, source, replies))
        return
    while (frame := PICKLE.read(source)) is not None:
        number, _, (args, options) = pickle.loads(frame)
        kind, value = "value", None
        try:
            value = function(*args, **options)
        except BaseException as error:  # SystemExit and the like must not end it in silence
            kind, value = "error", _error_to_send(error)
        replies.send(number, kind, value)


async def _serve_all_at_once(function: Any, source: BinaryIO, replies: _Replies) -> None:
    loop, frames = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()
    tasks, calls = dict[int, asyncio.Task[None]](), dict[int, ParentRequests]()

    def read() -> None:
        frame: bytes | None = b""
        while frame is not None:
            frame = PICKLE.read(source)
            loop.call_soon_threadsafe(frames.put_nowait, frame)

    async def run(number: int, args: Any, options: Any) -> None:
        parent_requests.set(calls[number])
        kind, value = "value", None
        try:
            value = await function(*args, **options)
        except asyncio.CancelledError:
            return
        except BaseException as error:
            kind, value = "error", _error_to_send(error)
        replies.send(number, kind, value)

    def forget(number: int) -> None:
        tasks.pop(number, None)
        calls.pop(number, None)

    threading.Thread(target=read, daemon=True).start()
    while (frame := await frames.get()) is not None:
        number, kind, what = pickle.loads(frame)
        if kind == "call":
            calls[number] = ParentRequests(number, replies.send)
            tasks[number] = loop.create_task(run(number, *what))
            tasks[number].add_done_callback(lambda _, number=number: forget(number))
        elif kind == "ping":
            replies.send(number, "value", None)
        elif number in tasks:
            tasks[number].cancel() if kind == "cancel" else calls[number].set_answer(*what)


def _error_to_send(error: BaseException) -> MilesError | str:
    """Return the form in which an error is sent: a MilesError as it is, else the traceback from the
    user's first frame on."""
    if isinstance(error, MilesError):
        return error
    return user_traceback(error) if isinstance(error, Exception) else f"it raised {error!r}"


if __name__ == "__main__":
    from milescli.workers.child import main as run  # one copy of this module, not two

    run(int(sys.argv[1]))
