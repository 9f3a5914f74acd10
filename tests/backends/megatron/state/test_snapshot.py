"""New ranks that are given a copy of the old ones' state do what those did, bit for bit."""

from __future__ import annotations

import pytest

from tests.backends.megatron.conftest import Worlds


@pytest.mark.parametrize("name", ["copy dense", "copy glm", "copy moe host"])
def test_new_ranks_go_on_from_a_copy_as_the_old_ones_did(worlds: Worlds, name: str) -> None:
    told = worlds.get("two")[name]
    assert told["restored"] == told["went on"]
    assert all(told["sizes"]), "model, random numbers, reference"


@pytest.mark.parametrize("kept", ["checkpoint", "copy"])
def test_random_numbers_of_host_and_device_go_on(worlds: Worlds, kept: str) -> None:
    assert worlds.get("one")["random states"][kept]
