"""The process behind the `math` reward: reads {label, response, limit_s} by the line, writes
{reward} or {error}."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

MEMORY_BOUND_BYTES = 4 * 1024**3
"""An answer can ask for numbers of any size."""
GRACE_S = 2.0
"""CPU seconds beyond the caller's bound after which the process ends by itself, should the caller
be gone."""


def grade(label: str, response: str) -> float:
    """1.0 or 0.0. Raises ValueError where the label is not mathematics."""
    from math_verify import parse, verify

    text = label.rpartition("####")[2].strip()
    wrapped = text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}"
    gold = parse(wrapped, parsing_timeout=None)
    if not text or not gold:
        raise ValueError(f"the label is not mathematics: {label!r}")
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))


def main() -> None:
    """Answer until standard input closes. Time is bounded by a signal whose default action ends the
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
            reply: dict[str, object] = {"reward": grade(question["label"], question["response"])}
        except ValueError as error:
            reply = {"error": str(error)}
        except (MemoryError, RecursionError, OverflowError):
            reply = {"reward": 0.0}
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
