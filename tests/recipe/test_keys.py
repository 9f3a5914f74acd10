"""The nearest key is the one that was meant."""

from __future__ import annotations

import pytest

from milescli.recipe.keys import keys, nearest_key, sections


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train.stps", "train.steps"),
        ("trian.steps", "train.steps"),
        ("train.lr", "train.optimizer.lr"),
        ("optimizer.lr", "train.optimizer.lr"),
        ("lr", "warmup.lr"),
        ("hidden_size", "model.scratch.hidden_size"),
        ("rollout.temprature", "rollout.temperature"),
        ("modle", "model"),
        ("rollout.max_tokens", "rollout.max_response_tokens"),
        ("n_samples_per_prompt", "rollout.samples_per_prompt"),
        ("zzzzzz", None),
    ],
)
def test_a_slip_finds_its_key(typed: str, meant: str | None) -> None:
    assert nearest_key(typed) == meant


def test_a_name_is_a_key_or_a_section() -> None:
    assert set(keys()).isdisjoint(sections())


def test_types_are_put_in_words() -> None:
    assert keys()["train.steps"].wants == "a whole number >= 1"
    assert keys()["parallel.tp"].wants == "a whole number >= 1, or null"
    assert keys()["rollout.top_p"].wants == "a number > 0 and <= 1"
    assert keys()["rollout.filter"].wants == "one of none, zero_variance"
    assert keys()["rollout.stop"].wants == "a list of texts"
    assert keys()["weights.verify"].wants == "true or false"
