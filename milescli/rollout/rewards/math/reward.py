"""Implements the `math` reward: equality of mathematical results by the math-verify library, which
runs in processes of its own.

Why processes: the library bounds its work by a SIGALRM, which Python allows in a main thread only;
and a response like 9**9**9**9 keeps the interpreter busy inside C, where no Python thread of the
same process runs on. A process can be killed."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from concurrent.futures import Future
from typing import Any

from milescli.core.errors import RewardError
from milescli.core.run_processes import cpu_seconds
from milescli.rollout.rewards.extraction import stated_answer
from milescli.rollout.rewards.math.worker import MEMORY_BOUND_BYTES, label_result
from milescli.workers.worker import CallFailed, UserWorker

_ANSWER = "milescli.rollout.rewards.math.worker:answer"
START_TIMEOUT_S = 120.0
MAX_SLOWDOWN = 3
"""Multiple of the limit that a grader may take on a busy machine, where it waits for CPU time."""
"""For importing sympy on a busy machine."""
MAX_GRADERS = 4
PLAIN_NUMBER = re.compile(r"-?(?:[0-9]{1,15}|[0-9]{1,3}(?:,[0-9]{3}){1,4})(?:\.[0-9]{1,15})?")
"""A label of this form certainly can be graded, without a call of a process."""
_log = logging.getLogger(__name__)


class MathReward:
    r"""Returns 1.0 if the response states the same answer as the label, else 0.0; safe to call from
    many threads.

    The label's answer is the text after its last `####`; within that text, its last `\boxed{}`. If
    a label has neither, the whole label is the answer: plain text or LaTeX (`\frac{1}{2}`, `(1,2]`,
    `\$36`). The response's answer is searched outside of thinking and Markdown. It is the first of
    these that the response has: its last `\boxed{}` or `\fbox{}` that is complete and not empty
    (with boxes that `and` or a comma joins to it), its last `<answer>`, the `answer` of its JSON,
    the text after its last `####` that is no heading, the sentence that names the answer, its last
    formula, its last number.

    Numbers are compared exactly, in any notation (`3e8`, `2 1/2`, `0.\overline{3}`, `1,234`);
    expressions by algebra, roots and logarithms for positive variables; `7 or 8`, sets and `\pm` as
    several values that must all be present; tuples, intervals and matrices by their parts, and
    `x=2, y=3` as `(2, 3)`; `3:4` up to a factor, `4:30 pm` as a time; `7 \pmod{10}` by its
    remainder; text without case. A unit is compared if both have one, and `50\%` is 50 or 1/2. A
    decimal number does not equal a fraction or root that it approximates, unless six places agree.
    A contradiction (`8=7`) equals nothing. A response that cannot be decided within `limit_s`
    scores 0.0 and is logged: models write such responses. Raises ValueError if the label cannot be
    graded.

    >>> score(label="1/2", response=r"So it is \boxed{\frac{1}{2}}.")
    1.0
    >>> score(label="1234", response="**Answer: 1,234**")
    1.0
    >>> score(label=r"\frac{e-1}{e}", response=r"$1-\frac{1}{\mathrm{e}}$")
    1.0
    >>> score(label="(2,3)", response="x=2, y=3")
    1.0
    >>> score(label="7 or 8", response="It is 8 or 7.")
    1.0
    >>> score(label="50%", response="0.5")
    1.0
    >>> score(label="2^{100}", response=r"\boxed{2^{100}-1}")
    0.0
    >>> score(label="1/3", response="0.33")
    0.0
    >>> score(label="1:00", response="12:00")
    0.0
    >>> score(label="5", response=r"<think>\boxed{5}</think> The answer is 6.")
    0.0
    """

    needs_label = True
    max_concurrency = min(MAX_GRADERS, os.cpu_count() or 1)
    """Useful number of concurrent calls; more would only wait, within the scorer's bound."""

    def __init__(self, *, limit_s: float = 10.0, max_s: float = float("inf")) -> None:
        """Set the bounds. `limit_s`: time for one answer; `max_s`: bound on a call, even on a
        machine that is too busy to give a grader its time."""
        self.limit_s, self.max_s = limit_s, max_s
        self.num_undecided = 0
        """Responses that scored 0.0 because time or memory ran out."""

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """Score one response as the class describes. Raises ValueError if the label cannot be
        graded."""
        if label is None:
            raise ValueError("`math` needs a label")
        reply = _GRADERS.grade(
            {"label": label, "response": response}, limit_s=self.limit_s, max_s=self.max_s
        )
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

    def answer(self, response: str) -> str | None:
        """Return the stated answer without white space; None if nothing is stated."""
        return "".join(stated_answer(response).split()) or None

    def check_label(self, label: str | None) -> str | None:
        """Return why the label cannot be graded; None if it can. It is graded against itself."""
        if label is None:
            return "`math` needs a label"
        if PLAIN_NUMBER.fullmatch(label_result(label)):
            return None
        reply = _GRADERS.grade({"label": label}, limit_s=self.limit_s)
        if reply is None:
            return f"it is not decided within {self.limit_s:g} s whether it equals itself"
        return str(reply["error"]) if "error" in reply else None

    def within(self, timeout_s: float) -> MathReward:
        """Return the same reward, bounded to return before the scorer's own timeout."""
        return MathReward(limit_s=min(self.limit_s, 0.5 * timeout_s), max_s=0.9 * timeout_s)


class GraderPool:
    """Manages a bounded set of math-verify processes, started on demand and ended with this one."""

    def __init__(self, size: int) -> None:
        self._idle: list[UserWorker] = []
        self._places = threading.BoundedSemaphore(size)

    def grade(
        self, question: dict[str, str], *, limit_s: float, max_s: float = float("inf")
    ) -> dict[str, object] | None:
        """Return the reply; None if the process used at least half of `limit_s` of CPU time without
        a result, or died of the question twice, and was replaced. Raises RewardError if no process
        can start, or if a busy machine gave it less CPU time than that within MAX_SLOWDOWN times
        `limit_s`, or within `max_s`."""
        deadline = time.monotonic() + max_s
        with self._places:
            for _ in range(2):
                process = self._idle_process()
                began_s, reply = cpu_seconds(process.pid), process.call(question)[1]
                try:
                    value = self._wait_for(process, reply, began_s, limit_s, deadline)
                except CallFailed:
                    process.end("it died")
                    continue
                if value is not None:
                    self._idle.append(process)
                return value
        return None

    def _wait_for(
        self,
        process: UserWorker,
        reply: Future[Any],
        began_s: float,
        limit_s: float,
        deadline: float,
    ) -> dict[str, object] | None:
        used_s, start = 0.0, time.monotonic()
        for _ in range(MAX_SLOWDOWN):
            left_s = min(limit_s, deadline - time.monotonic())
            if left_s <= 0:
                break
            with contextlib.suppress(TimeoutError):
                return reply.result(timeout=left_s)
            used_s = cpu_seconds(process.pid) - began_s
            if used_s >= 0.5 * limit_s:
                process.end("it took too long")
                return None
        process.end("it was given too little processor time")
        raise RewardError(
            "the `math` reward was given too little processor time",
            why=f"in {time.monotonic() - start:.0f} s its process computed for {used_s:.1f} s",
            fix="uptime   # what else runs on this machine? then start or resume the run",
        )

    def _idle_process(self) -> UserWorker:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was quicker
                process = self._idle.pop()
                if process.lives:
                    return process
        process = UserWorker(_ANSWER, MEMORY_BOUND_BYTES)
        try:
            # pays for the imports before the first question
            process.call({"label": "1"})[1].result(timeout=START_TIMEOUT_S)
        except (TimeoutError, CallFailed) as error:
            process.end("it did not start")
            raise RewardError(
                "the `math` reward did not start",
                why=str(error) or f"math-verify did not respond for {START_TIMEOUT_S:g} s",
                fix="pip install 'math-verify[antlr4_13_2]'",
            ) from None
        return process


_GRADERS = GraderPool(MathReward.max_concurrency)

math = MathReward()
"""The built-in reward `math`."""
