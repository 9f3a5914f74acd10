"""Corrects for the difference between the trainer's policy and the one that sampled.
`train.correction.kind` names a correction: built in here, an entry point, or an import path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from milescli.recipe.train import Train
from milescli.train.positions import require_each

if TYPE_CHECKING:
    import torch

    from milescli.train.packed_tokens import PackedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Holds the weights and figures of a correction, [S] each, at the positions of this rank."""

    weights: torch.Tensor
    """The surrogate's loss of each token is multiplied by it. The divisor of the mean stays."""
    figures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Shown as their means over the trained tokens."""


class CorrectionFn(Protocol):
    """Defines a plug-in of `train.correction.kind`. It is called once a step, with all tokens of
    this rank."""

    def __call__(
        self, *, log_ratio: torch.Tensor, tokens: PackedTokens, settings: Train
    ) -> Correction:
        """`log_ratio` [S]: log pi_old of the trainer - log pi of the engine that sampled."""
        ...


def corrected(
    correction: CorrectionFn, *, log_ratio: torch.Tensor, tokens: PackedTokens, settings: Train
) -> Correction:
    """Call the correction. Raises RecipeError if it does not return a weight for each position."""
    made = correction(log_ratio=log_ratio, tokens=tokens, settings=settings)
    values = made.weights if isinstance(made, Correction) else None
    require_each(correction, values, made, kind="correction", of="weights", count=len(log_ratio))
    return made
