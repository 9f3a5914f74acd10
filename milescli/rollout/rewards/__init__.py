"""Rewards by name: built in, from plug-ins, or by import path; resolved before a device is
taken."""

from __future__ import annotations

from typing import cast

from milescli.core.registry import Registry
from milescli.recipe.schema import Rollout
from milescli.rollout.base import RewardFn
from milescli.rollout.rewards.forms import Form, form_of
from milescli.rollout.rewards.processes import ProcessReward
from milescli.rollout.scoring import is_async

REWARDS = Registry(
    "reward",
    {
        "math": "milescli.rollout.rewards.math:math",
        "gsm8k": "milescli.rollout.rewards.gsm8k:gsm8k",
        "exact_match": "milescli.rollout.rewards.exact_match:exact_match",
    },
    signature=Form.SINGLE.value,
    others=(Form.GROUP.value, Form.BATCH.value),
)


def load_reward(rollout: Rollout) -> RewardFn:
    """The reward that `rollout.reward` names. Raises RecipeError where it cannot be had or does not
    have the signature."""
    reward = REWARDS.resolve(rollout.reward, key="rollout.reward")
    within = getattr(reward, "within", None)
    return cast(RewardFn, within(rollout.reward_timeout_s) if within else reward)


def in_processes(rollout: Rollout) -> ProcessReward | None:
    """One of the user's in worker processes, as a run calls it; None for a built-in one."""
    if rollout.reward in REWARDS.builtin:
        return None
    reward = REWARDS.resolve(rollout.reward, key="rollout.reward")
    return ProcessReward(
        REWARDS.path_of(rollout.reward, key="rollout.reward"),
        form=form_of(reward),
        is_async=is_async(reward),
        memory_bytes=int(rollout.reward_memory_gib * 1024**3),
        timeout_s=rollout.reward_timeout_s,
        max_concurrency=getattr(reward, "max_concurrency", None),
    )


def needs_label(name: str) -> bool:
    """Whether the reward `name` compares with a label: all built-in ones do; others may not."""
    return name in REWARDS.builtin
