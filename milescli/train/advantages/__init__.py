"""From rewards to advantages. `train.advantage` names an estimator: built in here, an entry point,
or an import path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Union

from milescli.core.errors import RecipeError
from milescli.core.role_views import has_role_rewards, views_of
from milescli.core.types import Group, Sample
from milescli.core.user_code import mend, name_of
from milescli.recipe.train import Train

if TYPE_CHECKING:
    import numpy as np

Advantage = Union[float, "Sequence[np.ndarray]"]
"""The advantage of one sample: a number, which all of its tokens share, or for each of its
trajectories [num_tokens]."""
AdvantageRows = Sequence[Sequence[Advantage]]
"""[groups][samples of the group]"""


class AdvantageEstimator(Protocol):
    """Defines a plug-in of `train.advantage`. An attribute `needs_greedy = True` requests
    `Group.greedy_reward`."""

    def __call__(self, *, groups: Sequence[Group], settings: Train) -> AdvantageRows:
        """Of all groups of a step, before they are split into updates."""
        ...


def estimate(
    estimator: AdvantageEstimator, groups: Sequence[Group], *, settings: Train
) -> AdvantageRows:
    """Return the estimator's advantages, computed separately for each role with a reward of its
    own. Raises RecipeError if they are not one finite number per sample."""
    if has_role_rewards(groups):
        return _by_role(estimator, groups, settings=settings)
    return _estimated(estimator, groups, settings=settings)


def _by_role(
    estimator: AdvantageEstimator, groups: Sequence[Group], *, settings: Train
) -> AdvantageRows:
    """For each sample [num_tokens] of each trajectory."""
    import numpy as np

    rows = [
        [[np.zeros(line.num_tokens, np.float32) for line in one.trajectories] for one in each]
        for each in (group.samples for group in groups)
    ]
    views = [views_of(group) for group in groups]
    for role in dict.fromkeys(role for of_group in views for role in of_group):
        numbers = [number for number, of_group in enumerate(views) if role in of_group]
        parts = [views[number][role] for number in numbers]
        given = _estimated(estimator, [part.group for part in parts], settings=settings)
        for number, part, values in zip(numbers, parts, given, strict=True):
            for (place, lines), value in zip(part.places, values, strict=True):
                for order, line in enumerate(lines):
                    own = value[order] if isinstance(value, Sequence) else value
                    rows[number][place][line][:] = own
    return rows


def _estimated(
    estimator: AdvantageEstimator, groups: Sequence[Group], *, settings: Train
) -> AdvantageRows:
    rows = estimator(groups=groups, settings=settings)
    sizes, expected = [len(row) for row in rows], [len(group.samples) for group in groups]
    name = name_of(estimator)
    if sizes != expected:
        raise RecipeError(
            f"the advantage estimator `{name}` gave {sizes} values a group",
            why=f"the groups have {expected} samples, and each needs one",
            fix=mend(estimator, "it returns a list of numbers for each group"),
        )
    for group, row in zip(groups, rows, strict=True):
        for index, (sample, value) in enumerate(zip(group.samples, row, strict=True)):
            if fault := _fault(sample, value):
                raise RecipeError(
                    f"the advantage estimator `{name}` gave {fault}",
                    why=f"for sample {index} of prompt {group.prompt.index}, whose rewards are "
                    f"{group.rewards}",
                    fix=mend(
                        estimator,
                        "an advantage is a finite number, or such a number for each token of each "
                        "trajectory",
                    ),
                )
    return rows


def _fault(sample: Sample, value: Advantage) -> str | None:
    import numpy as np

    if isinstance(value, int | float | np.number):
        return None if np.isfinite(value) else f"{value}"
    if not isinstance(value, Sequence) or not all(isinstance(row, np.ndarray) for row in value):
        return f"{value!r}"
    shapes = [row.shape for row in value]
    wanted = [(trajectory.num_tokens,) for trajectory in sample.trajectories]
    if shapes != wanted:
        return f"arrays of shapes {shapes} for trajectories of {wanted}"
    bad = [float(row[~np.isfinite(row)][0]) for row in value if not np.isfinite(row).all()]
    return f"{bad[0]}" if bad else None
