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
    """[S] each, of the positions of this rank."""

    loss: torch.Tensor
    figures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Shown as their means over the trained tokens."""


class Surrogate(Protocol):
    """A plug-in of `train.surrogate`. Two attributes may stand beside the call: `needs`, a
    frozenset of `Stream`s that must be there before it, and `complete(tokens, settings)`, called
    once a step on all tokens of a rank, which makes streams of streams."""

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
    """What the surrogate says. Raises RecipeError where that is not a loss for each position."""
    terms = surrogate(log_ratio=log_ratio, advantages=advantages, tokens=tokens, settings=settings)
    values = terms.loss if isinstance(terms, SurrogateTerms) else None
    require_each(surrogate, values, terms, kind="surrogate", of="a loss", count=len(log_ratio))
    return terms
