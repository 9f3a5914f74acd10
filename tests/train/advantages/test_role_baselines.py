"""Baselines of roles: against their definition, and across steps, stops and repeated packing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.errors import RecipeError
from milescli.core.examples import example_groups
from milescli.core.types import Group, Prompt, Sample, StepReport
from milescli.recipe.schema import Recipe
from milescli.recipe.train import Train
from milescli.train.advantages import estimate, next_state
from milescli.train.advantages.role_baselines import rae
from milescli.train.contract import check_advantage
from milescli.train.objectives.policy import Policy
from milescli.train.streams import Stream
from tests.samples import make_group, make_sample, make_trajectory

RAE = Recipe(train=Train(advantage="rae", baseline_decay=0.75))
REWARDS = st.floats(-1.0, 1.0, width=32)
GAMES = st.lists(
    st.tuples(st.sampled_from(["kuhn", "tictactoe", None]), REWARDS, REWARDS), min_size=1
)
"""[samples] (game, reward of the first player, of the second)"""
REPORT = StepReport(
    loss=0.0,
    grad_norm=0.0,
    lr=0.0,
    logprob_diff_mean=0.0,
    logprob_diff_max=0.0,
    logprob_diff_tokens=0,
    num_tokens=0,
    num_loss_tokens=0,
    num_microbatches=1,
    forward_backward_s=0.0,
    optimizer_s=0.0,
    figures={},
)


def _played(first: float, second: float) -> Sample:
    lines = [
        replace(make_trajectory([1], [2] * length), role=role)
        for role, length in (("first", 2), ("second", 3), ("first", 1))
    ]
    return replace(
        make_sample(*lines, reward=first), role_rewards={"first": first, "second": second}
    )


def _groups(games: Sequence[tuple[str | None, float, float]]) -> list[Group]:
    return [
        make_group(
            [_played(first, second)], prompt=Prompt(index=0, token_ids=[1], text="", source=game)
        )
        for game, first, second in games
    ]


@given(GAMES)
def test_each_role_of_each_game_has_a_moving_average(
    games: list[tuple[str | None, float, float]],
) -> None:
    rows = estimate(rae, _groups(games), settings=RAE.train)
    for place, (game, first, second) in enumerate(games):
        earlier = [(one, two) for source, one, two in games[: place + 1] if source == game]
        for role, own in ((0, first), (1, second)):
            weights = 0.25 * 0.75 ** np.arange(len(earlier))[::-1]
            expected = own - (weights * np.array([both[role] for both in earlier])).sum()
            values = np.ravel(rows[place][0][role])
            assert values == pytest.approx(expected, abs=1e-5)
        assert rows[place][0][2] == rows[place][0][0], "the same role"


@given(GAMES, GAMES)
def test_a_run_that_goes_on_is_the_one_that_was_not_stopped(
    before: list[tuple[str | None, float, float]], after: list[tuple[str | None, float, float]]
) -> None:
    whole, stopped, resumed = (Policy(recipe=RAE) for _ in range(3))
    for policy in (whole, stopped):
        policy.sequences(_groups(before))
        policy.observe(REPORT)
    resumed.restore(json.loads(json.dumps(stopped.state)))  # as a manifest stores it
    for policy in (whole, resumed):
        policy.sequences(_groups(before))  # packed for a rank that died, and once more
    made = [policy.sequences(_groups(after)) for policy in (whole, resumed)]
    for one, other in zip(*made, strict=True):
        assert (one.streams[Stream.ADVANTAGE] == other.streams[Stream.ADVANTAGE]).all()
    for policy in (whole, resumed):
        policy.observe(REPORT)
    assert whole.state == resumed.state
    alone = estimate(rae, _groups([*before, *after]), settings=RAE.train)
    last = made[0][-1].streams[Stream.ADVANTAGE]
    assert last[-1] == pytest.approx(float(np.ravel(alone[-1][0][2])[-1]), abs=1e-6)


def test_a_plain_episode_has_one_number_and_an_untrained_role_moves_nothing() -> None:
    plain = make_group([make_sample(make_trajectory([1], [2]), reward=1.0)])
    assert estimate(rae, [plain], settings=RAE.train) == [[0.75]]
    silent = replace(make_trajectory([1], [2], mask=[False]), role="judge")
    spoken = replace(make_trajectory([1], [2]), role="first")
    group = make_group([make_sample(silent, spoken, reward=1.0)])
    kept = next_state(rae, [group], settings=RAE.train, state={})
    assert kept == {'[null, "first"]': 0.25}


def mean_so_far(*, groups, settings, state=None):  # type: ignore[no-untyped-def]
    """An estimator of a user's."""
    return [[reward - state.get("mean", 0.0) for reward in group.rewards] for group in groups]


mean_so_far.next_state = lambda *, groups, settings, state: {"mean": groups[0].rewards[0]}  # type: ignore[attr-defined]


def forgetful(*, groups, settings, state=None):  # type: ignore[no-untyped-def]
    """An estimator that keeps what no checkpoint can store."""
    return [list(group.rewards) for group in groups]


forgetful.next_state = lambda **_: {"mean": "high"}  # type: ignore[attr-defined]


def test_estimators_of_users_keep_numbers_too_and_run_elsewhere() -> None:
    policy = Policy(recipe=Recipe(train=Train(advantage=f"{__name__}:mean_so_far")))
    groups = example_groups()[1:]
    assert policy.advantages(groups)[0] == [1.0] * 4
    policy.observe(REPORT)
    assert policy.state == {"advantage.mean": 1.0}
    assert policy.advantages(groups)[0] == [0.0] * 4
    with pytest.raises(RecipeError, match="`next_state` of the advantage estimator `forgetful`"):
        Policy(recipe=Recipe(), advantage=forgetful).advantages(groups)
    with pytest.raises(RecipeError, match="`next_state`"):
        check_advantage(forgetful)
    assert check_advantage(mean_so_far)[1] == [1.0 - example_groups()[0].rewards[0]] * 4
