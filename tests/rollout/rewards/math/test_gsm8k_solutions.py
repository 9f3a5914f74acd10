"""The graders on whole worked solutions of GSM8K's test split, right ones and wrong ones. Skipped
where the data set is not beside the repository."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from milescli.rollout.rewards.math.gsm8k import gsm8k
from milescli.rollout.rewards.math.worker import grade

DATA = Path(__file__).resolve().parents[5] / "shared/data/gsm8k/test.jsonl"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.exists(), reason=f"needs {DATA}"),
]
Grade = Callable[[str, str], float]


def _by_gsm8k(label: str, response: str) -> float:
    return gsm8k(prompt="", response=response, label=label)


def _solutions() -> list[tuple[str, str, float]]:
    """(label, response, reward), four for each problem."""
    answers = [json.loads(line)["answer"] for line in DATA.read_text().splitlines()]
    finals = [answer.rpartition("#### ")[2] for answer in answers]
    values = [float(final.replace(",", "")) for final in finals]
    made = []
    for place, (answer, final) in enumerate(zip(answers, finals, strict=True)):
        work, other = answer.rpartition("#### ")[0], (place + 1) % len(answers)
        is_right = float(values[other] == values[place])
        made += [
            (answer, answer, 1.0),
            (answer, f"{work}#### ${final}.00", 1.0),
            (answer, f"{work}#### {final}0", float(values[place] == 0)),
            (answer, f"{work}#### {finals[other]}", is_right),
        ]
    return made


@pytest.mark.parametrize("by", [_by_gsm8k, grade], ids=["gsm8k", "math"])
def test_worked_solutions_are_graded_as_they_are_labelled(by: Grade) -> None:
    logging.disable(logging.WARNING)
    try:
        solutions = _solutions()
        wrong = [row for row in solutions if by(row[0], row[1]) != row[2]]
    finally:
        logging.disable(logging.NOTSET)
    assert len(solutions) == 5276 and not wrong
