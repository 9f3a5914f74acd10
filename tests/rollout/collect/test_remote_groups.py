"""What the driver knows of groups whose tokens lie elsewhere is what it would know if it had
them: statistics, filters, advantages and batches are the same."""

from __future__ import annotations

import pickle
from array import array
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.types import (
    Group,
    Guesses,
    Prompt,
    RewardDetail,
    StopReason,
    Trajectory,
    WeightVersion,
)
from milescli.recipe.schema import Recipe
from milescli.rollout.collect.remote_groups import GroupNumbers, with_decisions
from milescli.rollout.collect.rollout_stats import summarise
from milescli.rollout.collect.selectors import overlong, truncated
from milescli.train.base import TrainSequence
from milescli.train.objectives import load_objective
from milescli.train.objectives.policy import Policy
from milescli.train.packing import pack, plan_shards
from tests.samples import make_group, make_sample, make_trajectory

RECIPE = Recipe.model_validate({"rollout": {"max_response_tokens": 8}})
ROLES = (None, "solver", "critic")


def _line(size: int, role: str | None, paid: float | None, version: int) -> Trajectory:
    made = make_trajectory([1, 2], range(size), version=version)
    first = 0.1 if paid and size > 2 else 0.0
    if first:  # two turns
        made = replace(made, loss_mask=bytes([0, 0, 1, 0, *[1] * (size - 2)]))
    rewards = None if paid is None else array("f", [0.0, 0.0, *[0.0] * (size - 1), paid])
    if rewards is not None and first:
        rewards[2] = first
    return replace(made, role=role, rewards=rewards)


_samples = st.builds(
    lambda lines, reward, version, stop, learned, guessed, index, roles: replace(
        make_sample(*(_line(*line, version) for line in lines), reward=reward, index=index),
        role_rewards={
            role: reward + place
            for place, role in enumerate(ROLES)
            if roles and role in [line[1] for line in lines] and role is not None
        },
        stop_reason=stop,
        is_learned=learned,
        guesses=Guesses(num_passes=guessed, num_guessed=guessed),
        reward_parts={"math": reward} if guessed else {},
    ),
    lines=st.lists(
        st.tuples(st.integers(1, 8), st.sampled_from(ROLES), st.sampled_from([None, 0.0, 0.5])),
        min_size=1,
        max_size=3,
    ),
    reward=st.floats(-2, 2),
    version=st.integers(0, 3),
    stop=st.sampled_from(StopReason),
    learned=st.booleans(),
    guessed=st.integers(0, 2),
    index=st.just(0),
    roles=st.booleans(),
)


def _group(samples: list, index: int) -> Group:
    prompt = Prompt(index=index, token_ids=[1, 2], text="")
    # a sample of a prompt may be missing, which could not be scored
    own = [replace(each, sample_index=2 * n) for n, each in enumerate(samples)]
    return replace(make_group(own, prompt=prompt), epoch=index % 2)


_groups = st.lists(st.lists(_samples, min_size=2, max_size=4), min_size=1, max_size=5).map(
    lambda rows: [_group(row, index) for index, row in enumerate(rows)]
)


def _numbers(groups: list[Group]) -> list[Group]:
    """Groups as the driver has them: through another process."""
    plain = {
        7 * place: replace(group, samples=[replace(one, is_learned=True) for one in group.samples])
        for place, group in enumerate(groups)
    }
    numbers: GroupNumbers = pickle.loads(pickle.dumps(GroupNumbers.of(plain)))
    of = {place: (group.epoch, group.prompt) for place, group in plain.items()}
    light = [*numbers.groups(of).values()]
    return [with_decisions(one, group) for one, group in zip(light, groups, strict=True)]


@given(_groups)
@settings(max_examples=50, deadline=None)
def test_statistics_and_decisions_are_the_same(groups: list[Group]) -> None:
    light, rollout = _numbers(groups), RECIPE.rollout
    for compared in ((), (RewardDetail.PARTS,), (RewardDetail.TURNS,)):
        summary = partial(summarise, refused=[], version=WeightVersion(3), compared=compared)
        assert summary(kept=light) == summary(kept=groups)
    for ours, theirs in zip(light, groups, strict=True):
        assert (ours.epoch, ours.prompt, ours.rewards) == (
            theirs.epoch,
            theirs.prompt,
            theirs.rewards,
        )
        assert overlong(group=ours, settings=rollout) == overlong(group=theirs, settings=rollout)
        pairs = zip(ours.samples, theirs.samples, strict=True)
        assert all(
            truncated(sample=one, settings=rollout) == truncated(sample=two, settings=rollout)
            and one.oldest_version == two.oldest_version
            and one.sample_index == two.sample_index
            for one, two in pairs
        )


def _pieces(
    policy: Policy, groups: list[Group], light: list[Group], ranks: list[list[int]], parts: int
) -> list[list[dict[int, TrainSequence]]]:
    """[processes][ranks] what processes cut that have every `parts`-th group."""
    of_tokens = policy.advantages_read_tokens
    rows, pieces = policy.advantages(groups if of_tokens else light), []
    given = policy.has_turn_rewards(light)
    for process in range(parts):
        made, first = dict[int, TrainSequence](), 0
        for number, (group, row) in enumerate(zip(groups, rows, strict=True)):
            if number % parts == process:
                if of_tokens:  # of each group by itself, where its tokens are
                    assert str(policy.advantages([group])) == str([row])
                own = policy.of_group(group, row, number=number, has_turn_rewards=given)
                made |= dict(enumerate(own, start=first))
            first += sum(len(one.trajectories) for one in group.samples)
        pieces.append([{n: made[n] for n in own if n in made} for own in ranks])
    return pieces


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"aggregation": "token_mean"},
        {"entropy_target": 0.3},
        {"credit": "to_go"},
        {"advantage": "turns"},
        {"advantage": "gigpo", "normalize_std": "none"},
        {"advantage": "hgpo"},
        {"advantage": "rae"},
    ],
)
@given(_groups, st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_a_batch_of_pieces_is_that_of_whole_groups(
    train: dict[str, object], groups: list[Group], dp: int, parts: int
) -> None:
    policy = load_objective("policy", Recipe.model_validate({"train": train}))
    assert isinstance(policy, Policy)
    light = _numbers(groups)
    layout = {"objective": "policy", "dp": dp, "max_tokens_per_microbatch": 12, "updates": 2}
    whole = pack(policy.sequences(groups), logprob_ids={0, 1}, **layout)
    layouts = plan_shards(policy.outlines(light), logprob_ids={0, 1}, **layout)
    ranks = [each.sequence_ids.tolist() or [0] for each in layouts]
    pieces = _pieces(policy, groups, light, ranks, parts)
    for rank, (ours, shard) in enumerate(zip(layouts, whole.shards, strict=True)):
        own = {n: one for of_process in pieces for n, one in of_process[rank].items()}
        filled = ours.with_tokens(own)
        np.testing.assert_equal(
            [getattr(filled, name) for name in filled.__slots__],
            [getattr(shard, name) for name in filled.__slots__],
        )
