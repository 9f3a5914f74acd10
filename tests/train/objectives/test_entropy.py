"""An entropy bonus that follows a target, and goes on where it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.examples import example_groups
from milescli.recipe.schema import Recipe
from milescli.recipe.train import Train
from milescli.train.base import is_adaptive
from milescli.train.objectives.policy import EntropyControl, Policy
from milescli.train.streams import Stream

TARGET = Train(entropy_target=1.0, entropy_coef=0.01, entropy_delta=0.005, entropy_max=0.02)


def test_it_rises_below_the_target_and_rests_above_it() -> None:
    control, weights = EntropyControl(TARGET), []
    for entropy in (0.5, 0.5, 0.5, 1.5, 1.5, 0.5):
        control.observe(entropy)
        weights.append(control.weight)
    assert weights == pytest.approx([0.015, 0.02, 0.02, 0.0, 0.0, 0.015])


@given(st.lists(st.floats(0, 3), max_size=12), st.lists(st.floats(0, 3), max_size=12))
def test_a_control_that_goes_on_is_the_one_that_was_not_stopped(
    before: list[float], after: list[float]
) -> None:
    whole, first = EntropyControl(TARGET), EntropyControl(TARGET)
    for entropy in before:
        whole.observe(entropy)
        first.observe(entropy)
    second = EntropyControl(TARGET)
    second.restore(first.state)
    for entropy in after:
        whole.observe(entropy)
        second.observe(entropy)
        assert 0 <= second.weight <= TARGET.entropy_max
    assert (second.weight, second.state) == (whole.weight, whole.state)


def test_without_a_target_the_weight_stays() -> None:
    control = EntropyControl(Train(entropy_coef=0.3))
    control.observe(0.0)
    assert control.weight == 0.3 and control.state == {}


def test_ranks_are_told_the_weight_by_a_stream() -> None:
    policy = Policy(recipe=Recipe(train=TARGET))
    assert is_adaptive(policy)
    policy.restore({"entropy_coef": 0.015625, "entropy_is_low": 1.0})
    for sequence in policy.sequences(example_groups()):
        assert set(sequence.streams[Stream.ENTROPY_COEF].tolist()) == {0.015625}
    plain = Policy(recipe=Recipe()).sequences(example_groups())
    assert Stream.ENTROPY_COEF not in plain[0].streams
