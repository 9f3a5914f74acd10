"""Runs a child process that answers calls over its pipes, on the parent's side. `UserWorker` is one
for the user's code: if that hangs in C, blocks an event loop, exits, exhausts memory or prints
without end, it is stopped and reported with its line, and only that process is lost."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from milescli.core.units import format_bytes
from milescli.workers.frames import PICKLE, Codec, Outbox

START_TIMEOUT_S = 120.0
"""Time limit of the start of a user's process: Python, and the user's imports."""
MAX_PRINTED_BYTES = 8 * 1024**2
"""Largest number of bytes that a user's process may print between two replies."""
MEMORY_BYTES = 8 * 1024**3
"""Default memory of a process that runs a user's code."""
_TAIL_BYTES = 4096
_DUMP_TIMEOUT_S = 3.0
"""Seconds for a process to print the lines at which it hangs."""
_DRAIN_S = 2.0
"""Time to read an ended process's last output: its pipe is closed, unless it began a daemon."""
_PACKAGE = str(Path(__file__).parents[1])

OnRequest = Callable[[int, Any], None]
"""Receives a request of a running call: (number of the question, value)."""


class CallFailed(Exception):
    """Reports that a call in another process returned nothing; the message says why, for the
    user."""


class EvictedCall(CallFailed):
    """Reports that the process was ended because another of its calls took too long; the call may
    be repeated."""


class Reply(Protocol):
    """Receives a call's outcome, in the reading thread; concurrent.futures.Future is one."""

    def set_running_or_notify_cancel(self) -> bool:
        """Return True if anybody still waits."""

    def set_result(self, value: Any) -> None:
        """Set the value that the call returned."""

    def set_exception(self, error: BaseException) -> None:
        """Set the error that the call raised, or the reason why its process has ended."""


class Worker:
    """Runs a child process, and the threads that write to its pipes and read from them, so that no
    caller waits for a pipe."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        codec: Codec,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        shows_output: bool = False,
        max_printed_bytes: float = float("inf"),
    ) -> None:
        """Start the process. `shows_output`: copy its standard error to ours; otherwise only errors
        show the end of it. `max_printed_bytes`: the process is ended if it prints more between two
        replies. Raises OSError if the process cannot be started."""
        self.ready: concurrent.futures.Future[Any] = concurrent.futures.Future()
        """Done with what it says once it can be called; raises as calls do where it ends first."""
        self._codec, self._shows_output = codec, shows_output
        self._waiting: dict[int, tuple[Reply, OnRequest | None]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._frames = Outbox(codec.pack)
        self._has_ended, self._is_drained = threading.Event(), threading.Event()
        self._cause, self._tail = "", b""
        self._num_printed, self._max_printed = 0, max_printed_bytes
        started: concurrent.futures.Future[subprocess.Popen[bytes]] = concurrent.futures.Future()
        _in_thread(lambda: self._run_process(command, env, cwd, started))
        self._process = started.result()
        _in_thread(self._write)
        _in_thread(self._read_output)

    @property
    def pid(self) -> int:
        """Return the id of the process, which is also that of its group."""
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Return True while the process can be called."""
        return not self._has_ended.is_set() and not self._cause

    def request(
        self, value: Any, *, kind: str = "call", on_request: OnRequest | None = None
    ) -> tuple[int, concurrent.futures.Future[Any]]:
        """Send one message; return its number, and the future of its reply. The future raises
        CallFailed with what the other side raised, or its MilesError."""
        reply: concurrent.futures.Future[Any] = concurrent.futures.Future()
        (number,) = self._expect([reply], on_request)
        self._frames.put((number, kind, value))
        return number, reply

    def request_many(self, calls: Sequence[tuple[Reply, Any]]) -> None:
        """Send [(who receives the reply, value)] in one frame."""
        numbers = self._expect([reply for reply, _ in calls])
        self._frames.put(
            [(number, "call", value) for number, (_, value) in zip(numbers, calls, strict=True)]
        )

    def cancel(self, number: int) -> None:
        """Tell the process that the result of this call is no longer needed."""
        with self._lock:
            self._waiting.pop(number, None)
        self._frames.put((number, "cancel", None))

    def ping(self) -> concurrent.futures.Future[Any]:
        """Return a future that is done once the process's event loop answers."""
        return self.request(None, kind="ping")[1]

    def close_input(self) -> None:
        """Close its input, so that the process cleans up and ends by itself."""
        self._frames.end()

    def end(self, cause: str = "it was ended") -> None:
        """End the process and all that it started, at once. `cause`: the message of the error that
        its open calls raise."""
        self._cause = self._cause or cause
        if not self._has_ended.is_set():
            self._kill()

    def close(self, grace_s: float = 0.0, *, cause: str = "it was ended") -> None:
        """Let the process end by itself within `grace_s`; then kill it."""
        if grace_s:
            self.close_input()
            self._has_ended.wait(grace_s)
        self.end(cause)

    def _kill(self) -> None:
        """Kill the group, before it is reaped: afterwards its id may be another process's."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _cause_of(self, status: int) -> str:
        """Return why the process ended unexpectedly."""
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        return f"its process ended with {how}"

    def _ended_error(self) -> Exception:
        """Return the error that calls raise once the process has ended."""
        return CallFailed(self._cause + self.last_printed())

    def _call_error(self, error: Any) -> Exception:
        """Return the error that a call raises if the other side has sent `error`."""
        return error if isinstance(error, Exception) else CallFailed(error)

    def last_printed(self, before: str = "; it printed last:\n") -> str:
        """Return the end of its standard error, after `before`; empty if there is none."""
        text = self._tail.decode("utf-8", "replace").strip()
        return before + text if text else ""

    def _bound_start(
        self, started: concurrent.futures.Future[Any], timeout_s: float, cause: str
    ) -> None:
        """End the process if it has not started in time."""

        def wait() -> None:
            if not concurrent.futures.wait([started], timeout_s).done:
                self.end(cause)

        _in_thread(wait)

    def _expect(self, replies: Sequence[Reply], on_request: OnRequest | None = None) -> list[int]:
        with self._lock:
            numbers = [next(self._numbers) for _ in replies]
            has_ended = self._has_ended.is_set()
            if not has_ended:
                self._waiting.update(
                    (number, (reply, on_request))
                    for number, reply in zip(numbers, replies, strict=True)
                )
        if has_ended:
            for reply in replies:
                reply.set_exception(self._ended_error())
        return numbers

    def _run_process(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: str | None,
        started: concurrent.futures.Future[subprocess.Popen[bytes]],
    ) -> None:
        """Start the process, and wait until it ends. One thread does both: the kernel ends the
        process with the thread that started it."""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                cwd=cwd,
                start_new_session=True,  # Ctrl-C is for the run, which ends this process
            )
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(self._process)
        self._read_replies()

    def _write(self) -> None:
        assert self._process.stdin is not None
        pipe = os.dup(self._process.stdin.fileno())
        self._process.stdin.close()
        self._frames.run(pipe)

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                frame = self._codec.read(self._process.stdout)  # type: ignore[arg-type]
                if frame is None:
                    break
                messages = self._codec.unpack(frame)
                replies = messages if isinstance(messages, list) else [messages]
                assert all(len(reply) == 3 for reply in replies), "it says something else"
            except Exception as error:  # the user's code has found our pipe, or made what no other
                # process can: whatever it is, no reply can be had from here on
                self.end(f"it wrote what is no reply: {error}")
                break
            self._num_printed = 0
            for reply in replies:
                self._take(*reply)
        self._fail_all()

    def _take(self, number: int, kind: str, value: Any) -> None:
        if kind == "ready":
            self.ready.set_result(value)
            return
        if kind == "ask":
            _, on_request = self._waiting.get(number, (None, None))
            if on_request is not None:
                on_request(*value)
            return
        with self._lock:
            reply, _ = self._waiting.pop(number, (None, None))
        if reply is None or not reply.set_running_or_notify_cancel():
            return
        if kind == "error":
            reply.set_exception(self._call_error(value))
        else:
            reply.set_result(value)

    def _fail_all(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            self._kill()  # what it began, too
        status = self._process.wait()
        self._frames.end()
        self._cause = self._cause or self._cause_of(status)
        self._is_drained.wait(_DRAIN_S)
        with self._lock:
            self._has_ended.set()
            waiting, self._waiting = list(self._waiting.values()), {}
        if not self.ready.done():
            self.ready.set_exception(self._ended_error())
        for reply, _ in waiting:
            if reply.set_running_or_notify_cancel():
                reply.set_exception(self._ended_error())

    def _read_output(self) -> None:
        assert self._process.stderr is not None
        while piece := os.read(self._process.stderr.fileno(), 1 << 16):
            self._tail = (self._tail + piece)[-_TAIL_BYTES:]
            self._num_printed += len(piece)
            if self._num_printed > self._max_printed:
                self.end(f"it printed more than {format_bytes(int(self._max_printed))} in one call")
            elif self._shows_output:
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(piece.decode("utf-8", "replace"))
                    sys.stderr.flush()
        self._is_drained.set()


class UserWorker(Worker):
    """Runs the user's code in a process; `child` is the other side."""

    def __init__(
        self,
        target: str,
        memory_bytes: int = MEMORY_BYTES,
        memory_key: str = "",
        *,
        shows_output: bool = False,
    ) -> None:
        """Start the process. `target`: `module:function` of miles, which runs there for each call;
        an `async def`, or a function marked `in_threads`, runs many calls at once. `memory_key`:
        the recipe's key for its memory limit. `shows_output`: as in Worker."""
        self._memory_bytes, self._memory_key = memory_bytes, memory_key
        self._lost_kind = CallFailed
        super().__init__(
            [sys.executable, "-m", "milescli.workers.child", str(memory_bytes)],
            codec=PICKLE,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            shows_output=shows_output,
            max_printed_bytes=MAX_PRINTED_BYTES,
        )
        self._frames.put((sys.path, target))
        self._bound_start(
            self.ready, START_TIMEOUT_S, f"its module was not imported within {START_TIMEOUT_S:g} s"
        )

    def call(
        self, *args: Any, on_request: OnRequest | None = None, **options: Any
    ) -> tuple[int, concurrent.futures.Future[Any]]:
        """Call the target; returns as `request`."""
        return self.request((args, options), on_request=on_request)

    def answer(self, number: int, question: int, value: Any) -> None:
        """Send the answer to a request of call `number`; an exception is raised there."""
        self._frames.put((number, "answer", (question, value)))

    def end_and_locate(self) -> str:
        """End the process because one call took too long; return the lines that it was
        executing."""
        where = self.current_lines()
        self._lost_kind = EvictedCall
        self.end("another call of it took too long")
        return where

    def current_lines(self) -> str:
        """Return the user's lines that it is executing, one per line; empty if they are not
        available. Forgets the output before."""
        self._tail, self._shows_output = b"", False
        if not self._has_ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                # not by send_signal, which would reap it before its group is ended
                os.kill(self._process.pid, signal.SIGUSR1)
        deadline, printed = time.monotonic() + _DUMP_TIMEOUT_S, b""
        while time.monotonic() < deadline and (not printed or printed != self._tail):
            printed = self._tail
            time.sleep(0.05)
        return _user_frames(printed.decode("utf-8", "replace"))

    def _ended_error(self) -> Exception:
        return self._lost_kind(self._cause + self.last_printed())

    def _call_error(self, error: Any) -> Exception:
        if isinstance(error, str) and "MemoryError" in error:
            key = f": {self._memory_key}" if self._memory_key else ""
            error += f"\n(it may take {format_bytes(self._memory_bytes)}{key})"
        return super()._call_error(error)


def _in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread that never keeps this process alive."""
    threading.Thread(target=work, name="miles-worker", daemon=True).start()


def _user_frames(dump: str) -> str:
    """Return the user's frames of the main thread in faulthandler's dump, innermost last. Other
    threads come before it."""
    dump = dump.rpartition("Current thread")[2]
    frames = [line.strip() for line in dump.splitlines() if line.strip().startswith("File ")]
    own = [line for line in frames if _PACKAGE not in line and "<frozen" not in line]
    return "".join(f"\n  {line}" for line in reversed(own[:6])) if own else ""
