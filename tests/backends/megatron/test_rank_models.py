"""Adapters that take turns in one model learn what they would learn alone, bit for bit."""

from __future__ import annotations

import pytest

from tests.backends.megatron.conftest import Worlds
from tests.backends.megatron.turns_cases import ADAPTERS, STEPS

NAMES = ("turns dense", "turns moe", "turns glm")


@pytest.mark.parametrize("name", NAMES)
def test_each_learns_what_it_would_learn_alone(worlds: Worlds, name: str) -> None:
    told = worlds.get("two")[name]
    assert told["in turns"] == told["alone"]
    plain, other = (told["in turns"][each] for each in ADAPTERS)
    assert plain[STEPS] != other[STEPS] and plain[0] != other[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_one_is_loaded_in_its_turn(worlds: Worlds, name: str) -> None:
    """While another was in the model when it was written."""
    told = worlds.get("two")[name]
    assert told["again"] == told["in turns"]["other"][STEPS - 1 :]
    assert told["saved"] and told["is left alone"]
