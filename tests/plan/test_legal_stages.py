"""Layers on stages: all of them, early stages first; microbatches in flight as the schedules have
them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.plan.legal import (
    is_even,
    microbatches_in_flight,
    split_layers,
    stage_ends,
    stage_sizes,
)
from milescli.plan.types import TrainerLayout


@given(layers=st.integers(1, 200), stages=st.integers(1, 64))
def test_every_layer_lies_on_one_stage_and_early_ones_take_the_odd(
    layers: int, stages: int
) -> None:
    sizes = split_layers(layers, stages)
    assert sum(sizes) == layers
    assert list(sizes) == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert is_even(sizes) is (layers % stages == 0)


@pytest.mark.parametrize(
    ("layers", "stages", "first", "last", "sizes"),
    [
        (61, 4, None, 13, (16, 16, 16, 13)),
        (94, 4, None, 22, (24, 24, 24, 22)),
        (78, 4, 18, 20, (18, 20, 20, 20)),
        (61, 8, None, 5, (8, 8, 8, 8, 8, 8, 8, 5)),
        (7, 1, None, None, (7,)),
    ],
)
def test_ends_are_pinned_and_the_rest_is_shared_out(layers, stages, first, last, sizes) -> None:
    layout = TrainerLayout(pp=stages, first_stage_layers=first, last_stage_layers=last)
    assert stage_sizes(layout, layers) == sizes
    assert stage_ends(layout, layers)[-1] == layers


def test_one_forward_one_backward_holds_as_many_as_stages_follow() -> None:
    assert [microbatches_in_flight(stage, 4, 10) for stage in range(4)] == [4, 3, 2, 1]
    assert [microbatches_in_flight(stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]
