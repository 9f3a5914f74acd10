"""Scored groups made by hand, with the variety of real ones, on which contracts of plug-ins are
tested. Not used by a run."""

from __future__ import annotations

import random
from array import array

from milescli.core.types import (
    Group,
    Pair,
    Prompt,
    Sample,
    StopReason,
    Trajectory,
    VersionSpan,
    WeightVersion,
)

_REWARDS = ([0.0, 1.0, 0.25, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0])


def example_groups() -> list[Group]:
    """Make three prompts of four samples: unequal rewards, equal ones, a sample with two
    trajectories, a truncated one, one without a token of the policy; lengths differ, and some
    tokens come from tools."""
    rng, groups = random.Random(0), []
    for index, rewards in enumerate(_REWARDS):
        samples = [
            Sample(
                sample_index=place,
                seed=100 * index + place,
                trajectories=[
                    _trajectory(rng, share=0.0 if (index, place) == (1, 0) else 0.8)
                    for _ in range(2 if (index, place) == (2, 3) else 1)
                ],
                text="2 + 2 = 4",
                stop_reason=StopReason.LENGTH if place == 2 else StopReason.STOP,
                reward=reward,
            )
            for place, reward in enumerate(rewards)
        ]
        prompt = Prompt(index=index, token_ids=[1, 2], text="What is 2 + 2?", label="4")
        groups.append(Group(prompt=prompt, samples=samples, greedy_reward=0.5))
    return groups


def example_pairs() -> list[Pair]:
    """Make six pairs of uneven lengths."""
    rng = random.Random(1)
    return [
        Pair(
            index=index,
            chosen=_trajectory(rng, share=1.0),
            rejected=_trajectory(rng, share=1.0),
            margin=0.1 * index,
            references=(),
        )
        for index in range(6)
    ]


def example_chats() -> list[Trajectory]:
    """Make twelve trajectories of uneven lengths."""
    return [side for pair in example_pairs() for side in pair.sides]


def _trajectory(rng: random.Random, *, share: float) -> Trajectory:
    """Make two tokens of a prompt, and a response of which the policy sampled about `share`."""
    length = rng.randint(3, 14)
    mask = [False, False, *(rng.random() < share for _ in range(length))]
    return Trajectory(
        token_ids=array("i", [1, 2, *(rng.randint(3, 9) for _ in range(length))]),
        loss_mask=bytes(mask),
        logprobs=array("f", [-rng.expovariate(1.0) if sampled else 0.0 for sampled in mask]),
        version_spans=[VersionSpan(start=2, end=length + 2, version=WeightVersion(0))],
    )
