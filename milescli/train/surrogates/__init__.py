"""The term of the policy loss that the advantages drive. `train.surrogate` names one: built in
here, an entry point, or an import path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch

from milescli.core.registry import Registry
from milescli.recipe.schema import Train
from milescli.train.packed_tokens import PackedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateTerms:
    """[S] each, of the positions of this rank."""

    loss: torch.Tensor
    figures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Shown as their means over the trained tokens."""


class Surrogate(Protocol):
    """A plug-in of `train.surrogate`."""

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


SURROGATES = Registry(
    "surrogate",
    {"clip": "milescli.train.surrogates.clip:clip"},
    signature=("log_ratio", "advantages", "tokens", "settings"),
)


def load_surrogate(name: str) -> Surrogate:
    """Raises RecipeError where `train.surrogate` names nothing that fits."""
    return cast(Surrogate, SURROGATES.resolve(name, key="train.surrogate"))
