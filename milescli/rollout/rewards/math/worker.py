"""Entry point of the `math` reward's processes: {label, response} becomes {reward} or {error}.
Without a response, the label is graded against itself."""

from __future__ import annotations

import logging

from milescli.rollout.rewards.extraction import MARK, last_boxed, stated_answer
from milescli.rollout.rewards.math.answer import Answer
from milescli.rollout.rewards.math.equality import equal, parse_answer

MEMORY_BOUND_BYTES = 4 * 1024**3
"""Bound on memory: a response can contain numbers of any size."""


def label_result(label: str) -> str:
    """Return the result that a label states: what follows its last `####`, and of this the last box
    if there is one."""
    text = MARK.split(label)[-1].strip()
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def grade(label: str, response: str) -> float:
    """Return 1.0 or 0.0. Raises ValueError if the label cannot be graded."""
    wanted = _label_answer(label)
    try:
        return float(equal(wanted, parse_answer(stated_answer(response))))
    except ValueError:  # a contradiction, or a number with too many digits
        refuse_ungradable(label)
        return 0.0


def refuse_ungradable(label: str) -> None:
    """Raise ValueError with the reason if a response that states the label's own result would score
    0."""
    if not equal(_label_answer(label), parse_answer(label_result(label))):
        raise ValueError("it does not equal itself")


def _label_answer(label: str) -> Answer:
    result = label_result(label)
    if last_boxed(f"\\boxed{{{result}}}") != result:
        raise ValueError("it is empty, or its braces do not balance")
    return parse_answer(result)


def answer(question: dict[str, str]) -> dict[str, object]:
    """Grade {label, response}; returns {reward} or {error}."""
    logging.disable(logging.WARNING)
    try:
        return _reply(question)
    except (MemoryError, RecursionError, OverflowError):
        return {"reward": 0.0} if "response" in question else {"error": "it is too large"}


def _reply(question: dict[str, str]) -> dict[str, object]:
    try:
        if "response" in question:
            return {"reward": grade(question["label"], question["response"])}
        refuse_ungradable(question["label"])
    except ValueError as error:
        return {"error": str(error)}
    return {}
