"""The nearest key is the one that was meant."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from milescli.recipe.keys import keys, nearest_key, sections
from milescli.recipe.layers import example
from milescli.recipe.reader import read
from milescli.recipe.schema import Recipe


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
    assert keys()["train.batch_size"].wants == "a whole number >= 1"
    assert keys()["train.steps"].wants == "a whole number >= 1 and <= 1000000000"
    assert keys()["parallel.tp"].wants == "a whole number >= 1, or null"
    assert keys()["rollout.top_p"].wants == "a number > 0 and <= 1"
    assert keys()["data.long_prompts"].wants == "one of drop, error"
    assert keys()["rollout.stop"].wants == "a list of texts"
    assert keys()["weights.verify"].wants == "true or false"


@pytest.mark.parametrize("name", [name for name, key in keys().items() if key.number])
def test_the_number_that_is_advised_is_one_that_the_key_takes(name: str) -> None:
    value: object = read(example(keys()[name]), source="here").value
    for part in reversed(name.split(".")):
        value = {part: value}
    try:
        Recipe.model_validate(value)
    except ValidationError as error:
        refused = [".".join(map(str, item["loc"])) for item in error.errors()]
        assert name not in refused, example(keys()[name])
