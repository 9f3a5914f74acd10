"""From rewards to advantages. `train.advantage` names an estimator: built in here, an entry point,
or an import path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, cast

from milescli.core.errors import RecipeError
from milescli.core.registry import Registry
from milescli.core.types import Group
from milescli.recipe.schema import Train

AdvantageRows = list[list[float]]
"""[groups][samples of the group]; all tokens of a sample share its advantage."""


class AdvantageEstimator(Protocol):
    """A plug-in of `train.advantage`."""

    def __call__(self, *, groups: Sequence[Group], settings: Train) -> AdvantageRows:
        """Of all groups of a step, before they are split into updates."""
        ...


ADVANTAGES = Registry(
    "advantage", {"grpo": "milescli.train.advantages.grpo:grpo"}, signature=("groups", "settings")
)


def load_advantage(name: str) -> AdvantageEstimator:
    """Raises RecipeError where `train.advantage` names nothing that fits."""
    return cast(AdvantageEstimator, ADVANTAGES.resolve_function(name, key="train.advantage"))


def estimate(
    estimator: AdvantageEstimator, groups: Sequence[Group], *, settings: Train
) -> AdvantageRows:
    """What the estimator says. Raises RecipeError where that is not one finite number a sample."""
    rows = estimator(groups=groups, settings=settings)
    sizes, expected = [len(row) for row in rows], [len(group.samples) for group in groups]
    name = getattr(estimator, "__name__", type(estimator).__name__)
    if sizes != expected:
        raise RecipeError(
            f"the advantage estimator `{name}` gave {sizes} values a group",
            why=f"the groups have {expected} samples, and each needs one",
            fix=f"mend `{name}`: it returns a list of numbers for each group",
        )
    for group, row in zip(groups, rows, strict=True):
        for index, value in enumerate(row):
            if not math.isfinite(value):
                raise RecipeError(
                    f"the advantage estimator `{name}` gave {value}",
                    why=f"for sample {index} of prompt {group.prompt.index}, whose rewards are "
                    f"{group.rewards}",
                    fix=f"mend `{name}`: an advantage is a finite number",
                )
    return rows
