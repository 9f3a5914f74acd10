"""Rewards as they are trained on, made of those that scored the responses. `rollout.shaping` names
one: built in here, an entry point, or an import path. Filters and figures see the rewards
before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast

from milescli.core.errors import RecipeError
from milescli.core.registry import Registry
from milescli.core.types import Group
from milescli.core.user_code import mend
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards.scoring import finite_reward
from milescli.workers.isolated import resolve_isolated

NONE = "none"


class Shaping(Protocol):
    """A plug-in of `rollout.shaping`."""

    def __call__(self, *, group: Group, settings: Rollout) -> Sequence[float]:
        """[samples] the rewards of a group's samples, in their order."""
        ...


SHAPINGS = Registry(
    "shaping",
    {
        NONE: "milescli.rollout.collect.shaping:unchanged",
        "overlong": "milescli.rollout.collect.shaping:overlong",
    },
    signature=("group", "settings"),
)


def load_shaping(name: str) -> Shaping:
    """Raises RecipeError where `rollout.shaping` names nothing that fits."""
    return cast(Shaping, resolve_isolated(SHAPINGS, name, key="rollout.shaping"))


def shaped(shaping: Shaping, group: Group, *, settings: Rollout) -> Group:
    """The group with its rewards shaped. Raises RecipeError where they are not a finite number for
    each sample."""
    rewards = shaping(group=group, settings=settings)
    try:
        numbers = [finite_reward(reward) for reward in rewards]
    except (TypeError, ValueError) as error:
        raise _refusal(group, settings, str(error)) from error
    if len(numbers) != len(group.samples):
        raise _refusal(group, settings, f"{len(numbers)} rewards for {len(group.samples)} samples")
    samples = [
        replace(sample, reward=reward)
        for sample, reward in zip(group.samples, numbers, strict=True)
    ]
    return replace(group, samples=samples)


def unchanged(*, group: Group, settings: Rollout) -> Sequence[float]:
    """As they are."""
    return group.rewards


def overlong(*, group: Group, settings: Rollout) -> Sequence[float]:
    """r + `overlong_penalty` x min(0, (L - B - n) / B); n: trained tokens of the sample; L:
    `max_response_tokens`; B: `overlong_buffer` (soft overlong punishment of DAPO, arXiv 2503.14476,
    eq. 13)."""
    longest = settings.max_response_tokens
    buffer = settings.overlong_buffer or max(longest // 5, 1)
    return [
        reward
        + settings.overlong_penalty
        * min(0.0, max(-1.0, (longest - buffer - sample.num_loss_tokens) / buffer))
        for sample, reward in zip(group.samples, group.rewards, strict=True)
    ]


def _refusal(group: Group, settings: Rollout, why: str) -> RecipeError:
    return RecipeError(
        f"the shaping `{settings.shaping}` gave what cannot be trained on",
        why=f"for the group of prompt {group.prompt.index}: {why}",
        fix=mend(settings.shaping, "it returns one finite number for each sample"),
    )
