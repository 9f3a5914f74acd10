"""The `math` reward: equality of mathematical results by the math-verify library, which runs in
processes of its own.

Why processes: the library bounds its work by a SIGALRM, which Python allows in a main thread only;
and a response like 9**9**9**9 keeps the interpreter busy inside C, where no Python thread of the
same process runs on. A process can be killed.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
import time

from milescli.core.errors import RewardError, WaitTimeout
from milescli.rollout.rewards.math_worker import result_of

START_TIMEOUT_S = 120.0
"""For importing sympy on a busy machine."""
MAX_WORKERS = 4
PLAIN_NUMBER = re.compile(r"-?(?:[0-9]{1,15}|[0-9]{1,3}(?:,[0-9]{3}){1,4})(?:\.[0-9]{1,15})?")
"""As a label it is graded by math-verify without doubt, so that no process need be asked."""
_log = logging.getLogger(__name__)


class MathReward:
    r"""1.0 where the response's mathematical value equals the label's, else 0.0; safe to call from
    many threads.

    Label: what follows its last `####`, of that the last `\boxed{}`, where it has them; else the
    whole, plain text or LaTeX (`\frac{1}{2}`, `(1,2]`, `\$36`). Response: the last `\boxed{}` or
    `\fbox{}` that is complete and not empty counts, and nothing else does; without one, the last
    LaTeX or plain expression that math-verify sees. A response that cannot be decided within
    `limit_s` scores 0.0 and is logged: models write such responses. Raises ValueError where the
    label cannot be graded.
    """

    max_concurrency = min(MAX_WORKERS, os.cpu_count() or 1)
    """Calls that make sense at once; more would only wait, within the scorer's bound."""

    def __init__(self, *, limit_s: float = 10.0) -> None:
        self.limit_s = limit_s
        self.num_undecided = 0
        """Responses that scored 0.0 because time or memory ran out."""

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """See the class."""
        if label is None:
            raise ValueError("`math` needs a label")
        reply = _WORKERS.ask({"label": label, "response": response}, limit_s=self.limit_s)
        if reply is None:
            self.num_undecided += 1
            _log.warning(
                "math: a response was not decided within %.1f s and scores 0: %.80r",
                self.limit_s,
                response,
            )
            return 0.0
        if "error" in reply:
            raise ValueError(f"the label {label!r} cannot be graded: {reply['error']}")
        return float(str(reply["reward"]))

    def check_label(self, label: str | None) -> str | None:
        """Why the label cannot be graded: it is graded against itself. None: it can."""
        if label is None:
            return "`math` needs a label"
        if PLAIN_NUMBER.fullmatch(result_of(label)):
            return None
        reply = _WORKERS.ask({"label": label}, limit_s=self.limit_s)
        if reply is None:
            return f"it is not decided within {self.limit_s:g} s whether it equals itself"
        return str(reply["error"]) if "error" in reply else None

    def within(self, timeout_s: float) -> MathReward:
        """The same reward, certain to return before the scorer's own bound."""
        return MathReward(limit_s=min(self.limit_s, 0.5 * timeout_s))


class _Workers:
    """A bounded set of math-verify processes, started when they are needed and ended with this
    process."""

    def __init__(self, size: int) -> None:
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(size)
        self._registered = False

    def ask(self, question: dict[str, str], *, limit_s: float) -> dict[str, object] | None:
        """The reply, or None where the worker ran out of time or died of the question; it is
        replaced then."""
        with self._places:
            worker = self._take_idle() or _Worker()
            try:
                reply = worker.ask(question, limit_s=limit_s)
            except BaseException:
                worker.kill()
                raise
            if reply is None:
                worker.kill()
                return None
            with self._lock:
                self._idle.append(worker)
            return reply

    def _take_idle(self) -> _Worker | None:
        with self._lock:
            if not self._registered:
                atexit.register(self.close)
                self._registered = True
            return self._idle.pop() if self._idle else None

    def close(self) -> None:
        """End all idle workers; a busy one ends by itself, when its standard input closes or its
        time is up."""
        with self._lock:
            while self._idle:
                self._idle.pop().kill()


class _Worker:
    """One process that reads questions and writes replies, a JSON line each."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "milescli.rollout.rewards.math_worker"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        if self._read_line(START_TIMEOUT_S) is None:
            status = self._status_if_ended()
            self.kill()
            if status is not None:
                raise RewardError(
                    "the `math` reward did not start",
                    why=f"`{' '.join(command[1:])}` ended with status {status}; its own message is "
                    "above",
                    fix="pip install 'math-verify[antlr4_13_2]'",
                )
            raise WaitTimeout(
                "the `math` reward waited for math-verify to start",
                why=f"nothing was heard from process {self._process.pid} for {START_TIMEOUT_S:.0f} "
                "s",
                fix="python -m milescli.rollout.rewards.math_worker   # should say ready within "
                "seconds",
            )

    def ask(self, question: dict[str, str], *, limit_s: float) -> dict[str, object] | None:
        """The reply, or None where none came in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**question, "limit_s": limit_s}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._read_line(limit_s)
        return None if line is None else json.loads(line)

    def kill(self) -> None:
        """At once; nothing of value is in it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _status_if_ended(self) -> int | None:
        try:
            return self._process.wait(timeout=1.0)  # its pipes close a moment before it ends
        except subprocess.TimeoutExpired:
            return None

    def _read_line(self, timeout_s: float) -> bytes | None:
        assert self._process.stdout is not None
        descriptor, deadline, line = (
            self._process.stdout.fileno(),
            time.monotonic() + timeout_s,
            b"",
        )
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(descriptor, 65536) if ready else b""
            if not piece:
                return None
            line += piece
        return line


_WORKERS = _Workers(MathReward.max_concurrency)

math = MathReward()
"""The built-in reward `math`."""
