"""Who scores a run's responses: the recipe's reward, those of the sources of its mix, and those of
its roles."""

from __future__ import annotations

from milescli.recipe.data import MixSource
from milescli.recipe.schema import Recipe, Rollout
from milescli.rollout import rewards
from milescli.rollout.rewards.reward_model import ScoreServer
from milescli.rollout.role_rewards import ByRole
from milescli.rollout.scoring import BySource, Scoring


def rollout_of_source(recipe: Recipe, source: MixSource) -> Rollout:
    """The recipe's `rollout`, with the reward of the source where it has one."""
    reward = source.reward or recipe.rollout.reward
    return recipe.rollout.model_copy(update={"reward": reward})


def scorer_of(recipe: Recipe, server: ScoreServer | None) -> Scoring:
    """The recipe's reward, bounded and retried as the recipe says; those of its mix, each for the
    prompts of its source; and those of its roles. `server`: who holds the reward model; None: the
    recipe names none."""
    usual = rewards.scorer_of(recipe.rollout, server)
    own = {
        source.called: rewards.scorer_of(rollout_of_source(recipe, source), server)
        for source in recipe.data.mix or []
        if source.reward is not None
    }
    episodes = BySource(usual, own) if own else usual
    roles = rewards.role_scorers_of(recipe.rollout, server)
    return ByRole(episodes, roles) if roles else episodes
