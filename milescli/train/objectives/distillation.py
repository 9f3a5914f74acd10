"""Learning a teacher's next-token distribution on texts that somebody wrote (Hinton et al., arXiv
1503.02531, at temperature 1; sequence by sequence for language models: arXiv 1606.07947)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from milescli.core.types import Trajectory
from milescli.recipe.schema import Recipe
from milescli.train.base import Figure, TokenLoss, TrainSequence
from milescli.train.distill import BY_CANDIDATES, divergence, streams_of
from milescli.train.objectives.supervised import Supervised
from milescli.train.packed_tokens import PackedTokens


class Distillation(Supervised):
    """An Objective over trajectories that somebody else made. Mean over all tokens on the masks."""

    def __init__(self, *, recipe: Recipe) -> None:
        """`train.distill` of the recipe."""
        super().__init__(recipe=recipe)
        self.settings = recipe.train.distill
        self.needs = frozenset() if recipe.caches_teacher else BY_CANDIDATES

    def sequences(self, items: Sequence[Trajectory]) -> list[TrainSequence]:
        """One for each trajectory, with what the teacher said of it where that is kept."""
        made = super().sequences(items)
        if self.needs:
            return made
        said = [item.teacher for item in items]
        assert all(said), "rows are asked about before the first step"
        return [
            replace(sequence, streams=streams_of(words))
            for sequence, words in zip(made, said, strict=True)
            if words is not None
        ]

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """coef * KL, see `divergence`; beside it -log pi(token), which nothing is learned from."""
        assert tokens.logprobs is not None and tokens.entropy is not None
        apart = divergence(tokens, self.settings)
        shown = {
            "teacher_kl": apart,
            "imitation_loss": -tokens.logprobs,
            "entropy": tokens.entropy,
        }
        return TokenLoss(
            loss=self.settings.coef * apart,
            figures={name: Figure(values.detach()) for name, values in shown.items()},
        )
