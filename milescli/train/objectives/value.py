"""What a critic minimises: the square of what it expected less what came (PPO, arXiv 1707.06347,
section 5), on the tokens that the policy is trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from milescli.core.types import Group
from milescli.recipe.schema import Recipe
from milescli.train.base import Figure, TokenLoss, TrainSequence
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream


class Value:
    """An Objective of a model that gives scores, on the tokens of another objective's step: VALUES
    and RETURNS are there."""

    needs: frozenset[Stream] = frozenset()
    of_scores = True

    def __init__(self, *, recipe: Recipe) -> None:
        """`train.critic` of the recipe."""
        self.settings = recipe.train.critic

    def sequences(self, items: Sequence[Group]) -> list[TrainSequence]:
        """The policy's are taken."""
        raise NotImplementedError("a critic learns from the tokens of the policy's step")

    def complete(self, tokens: PackedTokens) -> None:
        """The policy's objective has made what is needed."""

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """0.5 max((V - R)^2, (V_clipped - R)^2); V_clipped lies within `clip` of the value before
        the step."""
        assert tokens.scores is not None, "a critic gives scores"
        returns, before = tokens[Stream.RETURNS], tokens[Stream.VALUES]
        error = (tokens.scores - returns).square()
        figures = {"value_mean": tokens.scores.detach(), "return_mean": returns}
        if self.settings.clip is not None:
            bound = self.settings.clip
            clipped = before + (tokens.scores - before).clamp(-bound, bound)
            other = (clipped - returns).square()
            figures["value_clip_fraction"] = (other > error).float()
            error = torch.maximum(error, other)
        return TokenLoss(
            loss=0.5 * error, figures={name: Figure(value) for name, value in figures.items()}
        )
