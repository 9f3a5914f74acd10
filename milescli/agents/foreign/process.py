"""One process in a package's own virtual environment, and the threads that write to it and read
from it: many requests at once, as lines of JSON over its pipes. `host` begins one and begins it
again; `programs/miles_serving.py` is its far end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from milescli.workers.guard import guarded
from milescli.workers.worker import CallFailed

CLOSE_TIMEOUT_S = 45.0
"""For what it has to clean up once nobody asks it any more (containers, servers)."""
_END_TIMEOUT_S = 5.0
_TAIL_BYTES = 4096
_DRAIN_S = 2.0
_LINE_BYTES = 1 << 28
_NOT_PASSED_ON = ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH", "__PYVENV_LAUNCHER__")


class ProcessLost(CallFailed):
    """The process ended before it replied, or was never begun."""


@dataclass(eq=False)
class ForeignProcess:
    """From its begin to its end."""

    interpreter: Path
    """Of the virtual environment."""
    program: Path
    folders: Sequence[str] = ()
    """Where it, and what it begins, look for imports too."""

    def __post_init__(self) -> None:
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._has_ended, self._cause, self._tail = threading.Event(), "", b""
        self._has_said_all = threading.Event()
        begun: concurrent.futures.Future[subprocess.Popen[bytes]] = concurrent.futures.Future()
        _in_thread(lambda: self._live(begun))
        self._process = begun.result()
        _in_thread(self._write)
        _in_thread(self._read_output)

    @property
    def pid(self) -> int:
        """Of the guard around it, and of its group."""
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether it can be asked."""
        return not self._has_ended.is_set() and not self._cause

    def request(
        self, method: str, params: Mapping[str, Any]
    ) -> tuple[int, concurrent.futures.Future[Any]]:
        """Its number, and what will come of it. Through the future it raises CallFailed with what
        the package raised, ProcessLost where the process ends."""
        reply: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            number = next(self._numbers)
            if self._has_ended.is_set():
                reply.set_exception(self._lost())
                return number, reply
            self._waiting[number] = reply
        asked = {"id": number, "method": method, "params": dict(params)}
        self._lines.put(json.dumps(asked).encode() + b"\n")
        return number, reply

    def cancel(self, number: int) -> None:
        """Nobody waits for this request any more."""
        with self._lock:
            if self._waiting.pop(number, None) is None:
                return
        self._lines.put(json.dumps({"id": number, "cancel": True}).encode() + b"\n")

    def end(self, cause: str) -> None:
        """At once, with all that it began."""
        self._cause = self._cause or cause
        if not self._has_ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)  # the guard ends the others, then itself
            if not self._has_ended.wait(_END_TIMEOUT_S):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)

    def hang_up(self) -> None:
        """It is asked no more, and begins to clean up."""
        self._lines.put(None)

    def close(self) -> None:
        """Let it clean up and end by itself, within a bound."""
        self.hang_up()
        self._has_ended.wait(CLOSE_TIMEOUT_S)
        self.end("it was closed")

    def _live(self, begun: concurrent.futures.Future[subprocess.Popen[bytes]]) -> None:
        """From begin to end: the kernel ends the process with the thread that began it."""
        environment = {k: v for k, v in os.environ.items() if k not in _NOT_PASSED_ON}
        environment["PATH"] = f"{self.interpreter.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment["PYTHONPATH"] = os.pathsep.join(self.folders)
        try:
            process = subprocess.Popen(
                guarded([str(self.interpreter), str(self.program)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            begun.set_exception(error)
            return
        begun.set_result(process)
        self._read_replies(process)

    def _write(self) -> None:
        pipe: IO[bytes] = _pipe(self._process.stdin)
        with contextlib.suppress(OSError):  # it has ended: its reader says so
            while (line := self._lines.get()) is not None:
                pipe.write(line)
                pipe.flush()
        with contextlib.suppress(OSError):
            pipe.close()

    def _read_replies(self, process: subprocess.Popen[bytes]) -> None:
        pipe = _pipe(process.stdout)
        while line := pipe.readline(_LINE_BYTES):
            try:
                said = json.loads(line)
                number, error, result = said["id"], said.get("error"), said.get("result")
            except (ValueError, TypeError, KeyError, AttributeError) as fault:
                self._cause = f"it wrote what is no reply: {line[:80]!r} ({fault})"
                break
            with self._lock:
                reply = self._waiting.pop(number, None)
            if reply is None or not reply.set_running_or_notify_cancel():
                continue
            if error is not None:
                reply.set_exception(CallFailed(error.get("traceback") or error["message"]))
            else:
                reply.set_result(result)
        self._settle_all(process)

    def _settle_all(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._lines.put(None)
        self._has_said_all.wait(_DRAIN_S)
        self._cause = self._cause or "its process has ended"
        with self._lock:
            self._has_ended.set()
            waiting, self._waiting = list(self._waiting.values()), {}
        for reply in waiting:
            if reply.set_running_or_notify_cancel():
                reply.set_exception(self._lost())

    def _lost(self) -> ProcessLost:
        text = self._tail.decode("utf-8", "replace").strip()
        return ProcessLost(self._cause + (f"; it printed last:\n{text}" if text else ""))

    def _read_output(self) -> None:
        pipe = _pipe(self._process.stderr)
        while piece := os.read(pipe.fileno(), 1 << 16):
            self._tail = (self._tail + piece)[-_TAIL_BYTES:]
        self._has_said_all.set()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="miles-foreign", daemon=True).start()
