"""`rollout.speculative`: what is refused, and that a resumed run may change it."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from milescli.runtime.recording.run_records import MAY_CHANGE
from tests.recipe.conftest import Place

KEY = "rollout.speculative"


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        (["kind=draft"], "the draft model is missing"),
        (["model=Qwen/Qwen3-0.6B"], "but no draft model is used"),
        (["kind=ngram", "revision=main"], "no model is downloaded"),
        (["kind=mtp", "ngram_length=4"], "only applies to n-grams"),
        (["kind=ngram", "guesses=2", "ngram_breadth=3"], "2 guesses cannot have 3 alternatives"),
        (["kind=medusa"], "cannot be `medusa`"),
    ],
)
def test_settings_that_contradict_are_refused(place: Place, sets: list[str], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        place.load(sets=[f"{KEY}.{each}" for each in sets])


@pytest.mark.parametrize(
    ("kind", "other", "what"),
    [
        ("ngram", "engines.attention_dp=2", "with DP attention"),
        ("mtp", "weights.channel=distributed", "would not reach the layer"),
        ("mtp", "train.lora.rank=4", "serve an adapter cannot speculate with mtp"),
    ],
)
def test_what_sglang_cannot_do_beside_it_is_refused(
    place: Place, kind: str, other: str, what: str
) -> None:
    with pytest.raises(RecipeError, match=what):
        place.load(sets=[f"{KEY}.kind={kind}", other])


def test_runs_that_sample_nothing_guess_nothing(place: Place) -> None:
    rows = "model: {scratch: {}}\ndata: {train: rows.jsonl}\ntrain: {objective: supervised}\n"
    with pytest.raises(RecipeError, match="no samples to speed up"):
        place.load(rows, sets=[f"{KEY}.kind=ngram"])


def test_what_is_right_passes(place: Place) -> None:
    for sets in (["kind=ngram", "guesses=4", "ngram_breadth=2"], ["kind=mtp"],
                 ["kind=draft", "model=some/model", "revision=v1"]):  # fmt: skip
        place.load(sets=[f"{KEY}.{each}" for each in sets])


def test_a_resumed_run_may_guess_otherwise() -> None:
    assert KEY in MAY_CHANGE
