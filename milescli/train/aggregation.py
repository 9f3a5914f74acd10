"""Turns token losses into one number: the weight of each trained token, and the contribution of its
sample to the divisor. The loss of an update is sum(weight * token loss) / sum(count)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from milescli.core.errors import RecipeError
from milescli.core.user_code import name_of, plugin_fix
from milescli.recipe.train import Train


@dataclass(frozen=True, slots=True, kw_only=True)
class LossShare:
    """Holds the weight of one sample in the loss."""

    token_weight: float
    """Weight of each of its trained tokens."""
    count: float
    """Its contribution to the divisor of its update."""


class Aggregation(Protocol):
    """Defines a plug-in of `train.aggregation`."""

    def __call__(self, *, num_tokens: int, settings: Train) -> LossShare:
        """Return the share of a sample. `num_tokens`: its trained tokens, over all its
        trajectories; at least 1."""
        ...


def share_of(aggregation: Aggregation, *, num_tokens: int, settings: Train) -> LossShare:
    """Return the aggregation's share of one sample. Raises RecipeError if it is not a LossShare."""
    share = aggregation(num_tokens=num_tokens, settings=settings)
    if not isinstance(share, LossShare):
        name = name_of(aggregation)
        raise RecipeError(
            f"the aggregation `{name}` returned {share!r}",
            why="it must return the weight of each token of a sample, and the weight of the sample",
            fix=plugin_fix(aggregation, "it returns a milescli.train.aggregation.LossShare"),
        )
    return share


def token_mean(*, num_tokens: int, settings: Train) -> LossShare:
    """Mean over all trained tokens of the update (DAPO, arXiv 2503.14476, eq. 8)."""
    return LossShare(token_weight=1.0, count=float(num_tokens))


def sequence_mean(*, num_tokens: int, settings: Train) -> LossShare:
    """Mean over samples of the mean over their tokens (GRPO, arXiv 2402.03300, eq. 3)."""
    return LossShare(token_weight=1.0 / num_tokens, count=1.0)


def sequence_sum(*, num_tokens: int, settings: Train) -> LossShare:
    """Mean over samples of the sum over their tokens (REINFORCE as it is derived; LUSPO, arXiv
    2602.05261)."""
    return LossShare(token_weight=1.0, count=1.0)


def constant(*, num_tokens: int, settings: Train) -> LossShare:
    """Mean over samples of the sum over their tokens, divided by `constant_length`: a token weighs
    the same whatever its response's length (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    assert settings.constant_length is not None, "the objective fills it in"
    return LossShare(token_weight=1.0 / settings.constant_length, count=1.0)
