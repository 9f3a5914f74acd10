"""Greedy answers of `miles eval` to problems of GSM8K are those of transformers, token by token."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from tests.end_to_end.hugging_face import greedy
from tests.end_to_end.runs import ROOT, Workplace

pytestmark = pytest.mark.thorough

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
NUM_PROMPTS, MAX_NEW_TOKENS = 12, 24
PROBLEMS = [
    f"{name} has {count} {things} and buys {more} more for ${price} each. How much are all of "
    f"{name}'s {things} worth at that price?"
    for name, things in (("Mia", "apples"), ("Tom", "books"), ("Ada", "pens"), ("Lee", "cups"))
    for count, more, price in ((3, 4, 2), (12, 7, 5), (40, 25, 3))
]


def _rows() -> list[dict]:
    if GSM8K.exists():
        with GSM8K.open() as lines:
            return [json.loads(line) for line in islice(lines, NUM_PROMPTS)]
    return [{"question": problem, "answer": "#### 0"} for problem in PROBLEMS]


def test_greedy_answers_are_those_of_transformers(workplace: Workplace, smollm2: Path) -> None:
    problems = workplace.folder / "problems.jsonl"
    problems.write_text("".join(json.dumps(row) + "\n" for row in _rows()))
    finished = workplace.miles(
        *("eval", str(smollm2), "--data", "problems.jsonl", "--out", "answers"),
        *("--set", "rollout.reward=gsm8k", "--set", "engines.max_running_requests=8"),
        *("--set", f"eval.max_response_tokens={MAX_NEW_TOKENS}"),
    )
    assert finished.code == 0, finished
    file = workplace.folder / "answers" / "eval" / "problems" / "step_0.jsonl"
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(answers) == NUM_PROMPTS
    theirs = greedy(
        smollm2, [answer["prompt_ids"] for answer in answers], max_new_tokens=MAX_NEW_TOKENS
    )
    assert [answer["response_ids"] for answer in answers] == theirs
