"""Metrics of an evaluation besides its accuracy. `eval.metrics` names them: built in here, an entry
point, or an import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Protocol

from milescli.core.errors import RecipeError
from milescli.core.types import Group
from milescli.core.user_code import plugin_fix
from milescli.recipe.schema import Evaluation
from milescli.rollout.evaluation.scores import fewest_samples
from milescli.rollout.evaluation.statistics import pass_at, powers_of_two
from milescli.rollout.rewards.scoring import finite_reward


class Metrics(Protocol):
    """Defines a plug-in of `eval.metrics`."""

    def __call__(self, *, groups: Sequence[Group], settings: Evaluation) -> Mapping[str, float]:
        """Return name -> number, computed from the samples of all held-out prompts."""
        ...


def compute_metrics(
    metrics: Metrics, groups: Sequence[Group], *, settings: Evaluation
) -> dict[str, float]:
    """Compute the metrics. Raises RecipeError unless each name has a finite number."""
    said = metrics(groups=groups, settings=settings)
    try:
        return {str(name): finite_reward(value) for name, value in said.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise RecipeError(
            f"the metrics `{settings.metrics}` returned {said!r}",
            why=str(error),
            fix=plugin_fix(settings.metrics, "it returns a finite number for each name"),
        ) from error


def nothing(*, groups: Sequence[Group], settings: Evaluation) -> Mapping[str, float]:
    """Return no metrics besides accuracy."""
    return {}


def pass_at_k(*, groups: Sequence[Group], settings: Evaluation) -> Mapping[str, float]:
    """Return the chance that one of k samples is right (reward above 0), for k = 1, 2, 4, ... up to
    the samples of the prompt that has the fewest; the mean over prompts of `statistics.pass_at`."""
    return {
        f"pass_at_{k}": fmean(
            pass_at(k, num_samples=len(group.rewards), num_right=sum(r > 0 for r in group.rewards))
            for group in groups
        )
        for k in powers_of_two(fewest_samples(groups))
    }
