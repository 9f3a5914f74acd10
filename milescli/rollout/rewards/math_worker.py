"""The process behind the `math` reward: reads {label, response, limit_s} by the line, writes
{reward} or {error}. Without a response the label is graded against itself."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any

from milescli.rollout.rewards.boxed import last_boxed

MARK = "####"
"""What stands before it in a label is its derivation, as in GSM8K."""
MEMORY_BOUND_BYTES = 4 * 1024**3
"""A response can ask for numbers of any size."""
GRACE_S = 2.0
"""CPU seconds beyond the caller's bound after which the process ends by itself, should the caller
be gone."""


def result_of(label: str) -> str:
    """What a label states: what follows its last `####`, of that the last box where it has any."""
    text = label.rpartition(MARK)[2].strip()
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def grade(label: str, response: str) -> float:
    """1.0 or 0.0. Raises ValueError where the label cannot be graded."""
    from math_verify import verify

    boxed = last_boxed(response)
    target = _parse(response if boxed is None else _in_box(boxed))
    return float(verify(_gold(label), target, timeout_seconds=None))


def refuse_ungradable(label: str) -> None:
    """Raises ValueError with the reason where a response that states the label's own result would
    score nothing."""
    if not grade(label, _in_box(result_of(label))):
        raise ValueError("it does not equal itself")


def _gold(label: str) -> list[Any]:
    result = result_of(label)
    if last_boxed(_in_box(result)) != result:
        raise ValueError("it is empty, or its braces do not balance")
    gold = _parse(_in_box(result))
    if not gold:
        raise ValueError("it is not mathematics")
    return gold


def _in_box(text: str) -> str:
    return f"\\boxed{{{text}}}"


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None)


def main() -> None:
    """Reply until standard input closes. Time is bounded by a signal whose default action ends the
    process, even inside C."""
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which closes our input
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BOUND_BYTES, MEMORY_BOUND_BYTES))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not look like a reply
    grade("1", "1")  # pays for the imports before the first question
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin.buffer:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, question["limit_s"] + GRACE_S)
        try:
            reply = _reply(question)
        except (MemoryError, RecursionError, OverflowError):
            too_large: dict[str, object] = {"reward": 0.0}
            reply = too_large if "response" in question else {"error": "it is too large"}
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(reply), file=replies, flush=True)


def _reply(question: dict[str, str]) -> dict[str, object]:
    try:
        if "response" in question:
            return {"reward": grade(question["label"], question["response"])}
        refuse_ungradable(question["label"])
    except ValueError as error:
        return {"error": str(error)}
    return {}


if __name__ == "__main__":
    main()
