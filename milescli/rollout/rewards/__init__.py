"""Loads rewards by name: built in, from plug-ins, or by import path; one, or several with weights.
They are resolved before a device is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from milescli.core.plug_points import REWARDS
from milescli.rollout.base import BoundedReward, RewardFn
from milescli.rollout.rewards.forms import form_of, takes_images
from milescli.rollout.rewards.processes import ProcessReward
from milescli.rollout.rewards.scoring import Scorer, Scoring, WeightedScorer, is_async
from milescli.workers.isolated import IsolatedPlugin

if TYPE_CHECKING:  # worker processes, which begin by the dozen, need no schema
    from milescli.recipe.schema import Rollout
    from milescli.rollout.rewards.served.reward_model import ScoreServer


def load_rewards(rollout: Rollout) -> dict[str, RewardFn | BoundedReward]:
    """Load the rewards that `rollout.reward` names, by name. Raises RecipeError if one cannot be
    loaded, has another signature, or lacks a setting."""
    return {name: _loaded(name, rollout) for name in rollout.reward_weights}


def load_all_rewards(rollout: Rollout) -> dict[str, RewardFn | BoundedReward]:
    """Load all rewards, including those of roles, by name. Raises as `load_rewards`."""
    return {name: _loaded(name, rollout) for name in dict.fromkeys(rollout.reward_names)}


def _loaded(name: str, rollout: Rollout) -> RewardFn | BoundedReward:
    reward: Any = REWARDS.resolve(name)
    if name in REWARDS.builtin and hasattr(reward, "with_settings"):
        reward = reward.with_settings(rollout)
    within = getattr(reward, "within", None)
    return cast(RewardFn, within(rollout.reward_timeout_s) if within else reward)


def in_processes(name: str, rollout: Rollout) -> ProcessReward | None:
    """Return a user's reward in worker processes, as a run calls it; None for a built-in reward
    that needs no processes."""
    reward: Any = REWARDS.resolve(name)
    if not _runs_in_processes(name):
        return None
    return ProcessReward(
        REWARDS.path_of(name),
        form=form_of(reward),
        is_async=is_async(reward),
        memory_bytes=int(rollout.reward_memory_gib * 1024**3),
        timeout_s=rollout.reward_timeout_s,
        max_concurrency=getattr(reward, "max_concurrency", None),
        takes_images=takes_images(reward),
    )


def scorer_of(rollout: Rollout, server: ScoreServer | None = None) -> Scoring:
    """Make the scorer of the recipe's rewards, bounded and retried as the recipe says; users'
    rewards run in processes of their own. `server`: holds the reward model, if one is named."""
    scorers = {
        name: _scorer(in_processes(name, rollout) or _with_server(reward, server), name, rollout)
        for name, reward in load_rewards(rollout).items()
    }
    if isinstance(rollout.reward, str):
        (scorer,) = scorers.values()
        return scorer
    weights = rollout.reward_weights
    return WeightedScorer({name: (scorer, weights[name]) for name, scorer in scorers.items()})


def _scorer(reward: Any, name: str, rollout: Rollout) -> Scorer:
    return Scorer(
        reward,
        name=name,
        timeout_s=rollout.reward_timeout_s,
        retries=rollout.reward_retries,
    )


@contextmanager
def user_scorers(rollout: Rollout) -> Iterator[dict[str, Scorer]]:
    """Yield a scorer for each reward that does not ship with miles, including those of roles, by
    name; end their processes afterwards. Use it in one event loop."""
    names = [name for name in rollout.reward_names if name not in REWARDS.builtin]
    rewards = {name: in_processes(name, rollout) for name in dict.fromkeys(names)}
    try:
        yield {name: _scorer(reward, name, rollout) for name, reward in rewards.items()}
    finally:
        for reward in rewards.values():
            if reward is not None:
                reward.close()


def role_scorers_of(rollout: Rollout, server: ScoreServer | None = None) -> dict[str, Scoring]:
    """Make a scorer for each role that has a reward of its own, as `scorer_of`."""
    return {
        name: scorer_of(rollout.model_copy(update={"reward": role.reward}), server)
        for name, role in rollout.roles.items()
        if role.reward is not None
    }


def label_checks(rollout: Rollout) -> dict[str, RewardFn]:
    """Return the functions that check every label, by the names of the rewards; a reward that runs
    in processes of its own gets another process for this."""
    return {
        name: cast(RewardFn, _isolated(name) if _runs_in_processes(name) else reward)
        for name, reward in load_all_rewards(rollout).items()
    }


def _with_server(reward: RewardFn | BoundedReward, server: ScoreServer | None) -> Any:
    return reward.with_server(server) if hasattr(reward, "with_server") else reward


def _runs_in_processes(name: str) -> bool:
    reward = REWARDS.resolve(name)
    return name not in REWARDS.builtin or getattr(reward, "runs_apart", False)


def _isolated(name: str) -> IsolatedPlugin:
    plugin = REWARDS.resolve(name)
    return IsolatedPlugin(REWARDS.path_of(name), what=f"the reward `{name}`", plugin=plugin)


def answer_extractor(rollout: Rollout) -> Callable[[str], str | None] | None:
    """Return the function that extracts the stated answer from a response: that of the first
    built-in reward of the recipe that has one; None if no reward has one."""
    rewards = [r for name, r in load_rewards(rollout).items() if not _runs_in_processes(name)]
    return next((reward.answer for reward in rewards if hasattr(reward, "answer")), None)


def needs_label(rollout: Rollout) -> bool | None:
    """Return True if some reward compares with a label; a user's reward declares it by
    `needs_label`. None if no reward declares that it does, and at least one declares nothing."""
    declared = [
        getattr(reward, "needs_label", False if name in REWARDS.builtin else None)
        for name, reward in load_all_rewards(rollout).items()
    ]
    return any(declared) or (None if None in declared else False)
