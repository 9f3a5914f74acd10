"""How many tokens are guessed, with the reason."""

from __future__ import annotations

import pytest

from milescli.plan.choices import note_speculation, num_speculated_tokens
from milescli.plan.types import Log
from milescli.recipe.schema import Recipe


def _recipe(**settings: object) -> Recipe:
    return Recipe.model_validate({"rollout": {"speculative": settings}})


@pytest.mark.parametrize(
    ("settings", "on_cpu", "number", "reason"),
    [
        ({}, True, 0, "is none"),
        ({"kind": "ngram"}, True, 3, "longer on a CPU"),
        ({"kind": "ngram"}, False, 11, "SGLang's own default"),
        ({"kind": "ngram", "ngram_breadth": 5}, True, 5, "longer on a CPU"),
        ({"kind": "mtp"}, True, 1, "longer on a CPU"),
        ({"kind": "draft", "model": "m", "guesses": 6}, False, 6, "pinned by"),
    ],
)
def test_so_many_for_this_reason(settings: dict, on_cpu: bool, number: int, reason: str) -> None:
    made, why = num_speculated_tokens(_recipe(**settings), on_cpu=on_cpu)
    assert made == number
    assert reason in why


def test_the_plan_says_what_is_exact() -> None:
    said = {}
    for on_cpu in (True, False):
        log = Log()
        note_speculation(_recipe(kind="ngram"), on_cpu=on_cpu, log=log)
        said[on_cpu] = {each.key: each.reason for each in log.decisions}["rollout.speculative.kind"]
    assert "are those without it" in said[True]
    assert "a seed gives other tokens" in said[False]
    note_speculation(_recipe(), on_cpu=True, log=(none := Log()))
    assert not none.decisions
