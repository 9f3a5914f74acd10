"""A step tells the log-probs of the sequences that it is asked about, under any layout."""

from __future__ import annotations

import pytest

from tests.backends.megatron.conftest import Worlds
from tests.backends.megatron.told_cases import TOLD


@pytest.mark.parametrize(
    ("size", "name"), [(size, n) for size, names in TOLD.items() for n in names]
)
def test_a_step_tells_what_the_policy_said_before_it_moved(
    worlds: Worlds, size: str, name: str
) -> None:
    seen, how = worlds.get(size)[name], TOLD[size][name]
    asked = [number for number in range(seen["num_sequences"]) if number % 2 == 0]
    if how["old"] == "engine":  # later updates are read by a policy that has moved
        asked = [number for number in asked if number in seen["first"]]
    assert seen["told"] == asked
    assert seen["gap"] < 1e-5
    assert seen["moved"] > 1e-3, "the step changes what the policy says"
    assert seen["speakers"] == how["layout"].get("dp", 1), "one rank for each shard"


@pytest.mark.parametrize(
    ("size", "name"), [(size, n) for size, names in TOLD.items() for n in names]
)
def test_what_the_start_check_does_to_ranks_is_small_and_leaves_nothing(
    worlds: Worlds, size: str, name: str
) -> None:
    checked = worlds.get(size)[name]["checked"]
    assert 0 < checked["rounded"] < 1e-5 and checked["is_repeated"]
    assert checked["silent"] > 1e-3 and checked["is_restored"]
