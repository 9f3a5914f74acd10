"""Imitation: the negative log-likelihood of the tokens on the loss mask. The warm-up."""

from __future__ import annotations

from collections.abc import Sequence

from milescli.core.types import Trajectory
from milescli.recipe.schema import Recipe
from milescli.train.base import Figure, TokenLoss, TrainSequence, sequence_of
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream


class Supervised:
    """An Objective over trajectories that somebody else made. Mean over all tokens on the masks."""

    needs: frozenset[Stream] = frozenset()
    takes = "chats"

    def __init__(self, *, recipe: Recipe) -> None:
        """Nothing of the recipe changes it."""

    def sequences(self, items: Sequence[Trajectory]) -> list[TrainSequence]:
        """One for each trajectory."""
        return [
            sequence_of(
                trajectory,
                streams={},
                token_weight=1.0,
                share=float(trajectory.num_loss_tokens),
                group=index,
            )
            for index, trajectory in enumerate(items)
        ]

    def complete(self, tokens: PackedTokens) -> None:
        """Nothing is missing."""

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """-log pi(token)."""
        assert tokens.logprobs is not None and tokens.entropy is not None
        return TokenLoss(loss=-tokens.logprobs, figures={"entropy": Figure(tokens.entropy)})
