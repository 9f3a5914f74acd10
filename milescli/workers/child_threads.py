"""Runs many calls of a plain function at once, in the child of a UserWorker: quick ones one after
the other in the thread that reads them, slow ones each in a thread of its own.

One thread leads: it reads calls and runs them. If a call takes longer than `STALL_S`, another
thread takes the lead, and the call continues in its own thread. For some time after that, the lead
is passed on before calls of this kind run; then one is tried again as if it were quick."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from milescli.workers.frames import PICKLE, SIZE, Message

STALL_S = 0.02
"""Seconds after which a call counts as slow; longer than a busy machine occasionally stops a
thread."""
FIRST_WHILE_S, LONGEST_WHILE_S = 0.05, 1.0
"""Seconds for which a kind of calls counts as slow: doubled each time that one is slow again."""
MAX_THREADS = 4096
"""Largest number of possibly slow calls at once; further ones wait."""
STACK_BYTES = 1024**2
"""Stack of each thread in bytes: all stacks count against the memory of the process."""
_PIECE = 1 << 16
"""Largest number of bytes of one read; a pipe holds as much."""
_QUIET_ROUNDS = 50
"""Rounds without a call until the watch sleeps."""
_MAX_PER_FRAME = 64
"""Largest number of replies that are sent in one frame while quick calls are waiting."""


class LeadingThreads:
    """Holds the threads and the state that they share."""

    def __init__(
        self,
        function: Callable[..., Any],
        source: int,
        *,
        reply: Callable[[list[Message]], None],
        failed: Callable[[BaseException], Any],
    ) -> None:
        """Set up the threads. `function`: runs a call; the type of its last argument is the kind of
        the call. `source`: the pipe; `reply`: writes messages, in one thread at a time; `failed`:
        returns the value to send for an exception."""
        self._function, self._source, self._reply, self._failed = function, source, reply, failed
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._baton, self._ended = threading.Semaphore(0), threading.Event()
        self._is_watched, self._wakes_watch = True, threading.Event()
        self._num_idle = self._num_threads = 0
        self._has_no_leader = False
        self._pending: deque[Message] = deque()
        self._read = bytearray()
        self._replies: list[Message] = []
        self._called: list[Any] | None = None
        """[began, kind] of the call that the leader is making, while it leads."""
        self._slow: dict[type, tuple[float, float]] = {}
        """Kinds of calls that count as slow: (until when, for how long)."""

    def run(self) -> None:
        """Serve calls until the pipe ends."""
        threading.stack_size(STACK_BYTES)
        self._start_thread()
        threading.Thread(target=self._watch, daemon=True).start()
        self._ended.wait()

    def _start_thread(self) -> None:
        self._num_threads += 1
        threading.Thread(target=self._live, name="miles-call", daemon=True).start()

    def _live(self) -> None:
        """Lead, then wait to lead again; in each thread."""
        while True:
            self._lead()
            with self._lock:
                if self._has_no_leader:
                    self._has_no_leader = False
                    continue
                self._num_idle += 1
            self._baton.acquire()

    def _pass_on(self) -> None:
        """Let another thread lead; with the lock."""
        if self._num_idle:
            self._num_idle -= 1
            self._baton.release()
        elif self._num_threads < MAX_THREADS:
            self._start_thread()
        else:
            self._has_no_leader = True  # the first that is free does

    def _lead(self) -> None:
        """Read and make calls, until another thread leads."""
        while True:
            if not self._pending and not self._wait_for_calls():
                self._ended.set()
                threading.Event().wait()  # the process ends with its main thread
            number, kind, what = self._pending.popleft()
            if kind == "call":
                if not self._leads_after(number, *what):
                    return
            elif kind == "ping":
                self._replies.append((number, "value", None))
            if not self._pending or len(self._replies) >= _MAX_PER_FRAME:
                self._flush()

    def _leads_after(self, number: int, args: Any, options: Any) -> bool:
        """Make one call. Return False if another thread leads since, and the reply is sent."""
        kind = type(args[-1])
        now = time.monotonic()
        if kind in self._slow and now < self._slow[kind][0]:
            self._flush()
            with self._lock:
                self._pass_on()
            self._send([(number, *self._make_call(args, options))])
            return False
        called = self._called = [now, kind]
        if not self._is_watched:
            self._wakes_watch.set()
        reply = (number, *self._make_call(args, options))
        with self._lock:
            still_leads = self._called is called
            if still_leads:  # else it is the next leader's
                self._called = None
                self._slow.pop(kind, None)
        if still_leads:
            self._replies.append(reply)
        else:
            self._send([reply])
        return still_leads

    def _make_call(self, args: Any, options: Any) -> tuple[str, Any]:
        """Run a call; return (`value`, its result) or (`error`, what to send)."""
        try:
            return "value", self._function(*args, **options)
        except BaseException as error:  # SystemExit and the like must not end it in silence
            return "error", self._failed(error)

    def _watch(self) -> None:
        """Let another thread lead if the leader's call takes long; sleep while there are no
        calls."""
        quiet = 0
        while True:
            time.sleep(STALL_S)
            replies = list[Message]()
            with self._lock:
                called = self._called
                quiet = quiet + 1 if called is None else 0
                if called is not None and time.monotonic() - called[0] > STALL_S:
                    self._called, kind = None, called[1]
                    _, slow_s = self._slow.get(kind, (0.0, FIRST_WHILE_S / 2))
                    slow_s = min(2 * slow_s, LONGEST_WHILE_S)
                    self._slow[kind] = (time.monotonic() + slow_s, slow_s)
                    replies, self._replies = self._replies, []
                    self._pass_on()
            self._send(replies)
            if quiet > _QUIET_ROUNDS:
                self._wakes_watch.clear()
                self._is_watched = False
                self._wakes_watch.wait(timeout=1.0)
                self._is_watched, quiet = True, 0

    def _flush(self) -> None:
        """Send all replies; called by the leader."""
        with self._lock:
            replies, self._replies = self._replies, []
        self._send(replies)

    def _send(self, replies: list[Message]) -> None:
        if replies:
            with self._writing:
                self._reply(replies)

    def _wait_for_calls(self) -> bool:
        """Wait for calls; return False if none can follow."""
        self._flush()
        while not self._pending:
            piece = b""
            with contextlib.suppress(OSError):
                piece = os.read(self._source, _PIECE)
            if not piece:
                return False
            self._read += piece
            self._take_frames()
        return True

    def _take_frames(self) -> None:
        read, place = self._read, 0
        while len(read) - place >= SIZE.size:
            end = place + SIZE.size + SIZE.unpack_from(read, place)[0]
            if end > len(read):
                break
            message = PICKLE.unpack(memoryview(read)[place + SIZE.size : end])
            self._pending.extend(message if isinstance(message, list) else [message])
            place = end
        del read[:place]
