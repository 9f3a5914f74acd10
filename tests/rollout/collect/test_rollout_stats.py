"""Figures of a step: what engines guessed, over all that was generated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from milescli.core.types import Group, Guesses, WeightVersion
from milescli.rollout.collect.rollout_stats import summarise
from tests.samples import make_group, make_sample, make_trajectory, rewarded


def _group(*guesses: Guesses) -> Group:
    sample = make_sample(make_trajectory([1], [2, 3]))
    return make_group([replace(sample, guesses=each) for each in guesses])


def test_lengths_and_rates_are_of_all_passes_together() -> None:
    kept = _group(Guesses(num_passes=10, num_guessed=30, num_right=5), Guesses())
    refused = _group(Guesses(num_passes=30, num_guessed=90, num_right=25))
    stats = summarise(kept=[kept], refused=[refused], version=WeightVersion(0))
    assert stats.accept_length == pytest.approx(1 + 30 / 40)
    assert stats.accept_rate == pytest.approx(30 / 120)


def test_engines_that_guess_nothing_have_neither() -> None:
    stats = summarise(kept=[_group(Guesses())], refused=[], version=WeightVersion(0))
    assert stats.accept_length is None and stats.accept_rate is None


def test_groups_are_counted_by_their_mean_reward() -> None:
    kept = [rewarded([0, 0]), rewarded([1, 0]), rewarded([0.1, 0.1]), rewarded([1, 1, 1])]
    refused = [rewarded([0.3] * 3), rewarded([0.05, 0]), rewarded([1, 0.999]), rewarded([0.0])]
    counts = summarise(kept=kept, refused=refused, version=WeightVersion(0)).reward_histogram
    assert counts == (2, 1, 1, 0, 1, 0, 1, 0, 0, 0, 1, 1)


@pytest.mark.parametrize("reward", [-0.5, 1.5])
def test_rewards_beyond_one_are_not_counted(reward: float) -> None:
    kept = [rewarded([0, 1]), rewarded([reward])]
    assert summarise(kept=kept, refused=[], version=WeightVersion(0)).reward_histogram == ()
