"""Samples and groups made by hand, for tests of whatever eats them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from milescli.core.types import (
    Group,
    Prompt,
    RoutedExperts,
    Sample,
    StopReason,
    Trajectory,
    VersionSpan,
    WeightVersion,
)


def make_trajectory(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    mask: Sequence[bool] | None = None,
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    routed_experts: RoutedExperts | None = None,
) -> Trajectory:
    """`mask` and `logprobs`: of the response; all True and -1.0 where they are not given."""
    sampled = [True] * len(response) if mask is None else list(mask)
    values = [-1.0] * len(response) if logprobs is None else list(logprobs)
    given = [0.0] * len(prompt)
    return Trajectory(
        token_ids=array("i", [*prompt, *response]),
        loss_mask=bytes(len(prompt)) + bytes(sampled),
        logprobs=array(
            "f", given + [v if m else 0.0 for v, m in zip(values, sampled, strict=True)]
        ),
        version_spans=[
            VersionSpan(
                start=len(prompt),
                end=len(prompt) + len(response),
                version=WeightVersion(version),
            )
        ],
        routed_experts=routed_experts,
    )


def make_sample(
    *trajectories: Trajectory, reward: float | None = 0.0, index: int = 0, text: str = ""
) -> Sample:
    """Scored, and ended by itself."""
    return Sample(
        sample_index=index,
        seed=index,
        trajectories=list(trajectories),
        text=text,
        stop_reason=StopReason.STOP,
        reward=reward,
    )


def make_group(samples: Sequence[Sample], *, prompt: Prompt | None = None) -> Group:
    """Of one prompt."""
    return Group(prompt=prompt or Prompt(index=0, token_ids=[1], text=""), samples=list(samples))


def rewarded(rewards: Sequence[float], *, version: int = 0) -> Group:
    """A group of samples of one token each, by the weights `version`."""
    return make_group(
        [
            make_sample(make_trajectory([1], [2], version=version), reward=reward, index=index)
            for index, reward in enumerate(rewards)
        ]
    )
