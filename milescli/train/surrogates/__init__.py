"""The term of the policy loss that the advantages drive. `train.surrogate` names one: built in
here, an entry point, or an import path."""

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
class SurrogateTerms:
    """Holds the terms of a surrogate, [S] each, at the positions of this rank."""

    loss: torch.Tensor
    figures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Shown as their means over the trained tokens."""


class Surrogate(Protocol):
    """Defines a plug-in of `train.surrogate`. Two attributes are optional: `needs`, a frozenset of
    the `Stream`s that it requires, and `complete(tokens, settings)`, called once a step on all
    tokens of a rank to compute streams from streams."""

    def __call__(
        self,
        *,
        log_ratio: torch.Tensor,
        advantages: torch.Tensor,
        tokens: PackedTokens,
        settings: Train,
    ) -> SurrogateTerms:
        """`log_ratio` [S]: log pi - log pi_old, with gradient; `advantages` [S]; `tokens`: for
        sums over sequences."""
        ...


def terms_of(
    surrogate: Surrogate,
    *,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    tokens: PackedTokens,
    settings: Train,
) -> SurrogateTerms:
    """Call the surrogate. Raises RecipeError if it does not return a loss for each position."""
    terms = surrogate(log_ratio=log_ratio, advantages=advantages, tokens=tokens, settings=settings)
    values = terms.loss if isinstance(terms, SurrogateTerms) else None
    require_each(surrogate, values, terms, kind="surrogate", of="a loss", count=len(log_ratio))
    return terms
