"""Objectives of models that give scores: a reward model, learned from pairs, and the critic's
values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from milescli.core.types import Group, Pair
from milescli.platform.lazy import torch
from milescli.recipe.schema import Recipe
from milescli.train.base import Figure, Reduce, TokenLoss, TrainSequence
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream

_MARGIN = "margin"
_AFTER = 0
"""Any token: it follows the last one, so that the score there, after the model has read everything,
is the score of the sequence."""


class RewardModel:
    """Implements Objective over pairs, for a model that gives scores."""

    needs: frozenset[Stream] = frozenset()
    takes = "pairs"
    of_scores = True

    def __init__(self, *, recipe: Recipe) -> None:
        """Take the settings from `train.reward_model` of the recipe."""
        self.settings = recipe.train.reward_model

    def sequences(self, items: Sequence[Pair]) -> list[TrainSequence]:
        """Return two sequences per pair, the chosen one first, which form one unit."""
        made = []
        for pair in items:
            assert len(pair.sides) == 2, f"row {pair.index + 1} is not a pair"
            for side in pair.sides:
                sequence = scored_sequence(side.token_ids, group=pair.index, margin=pair.margin)
                made.append(replace(sequence, unit=pair.index))
        return made

    def complete(self, tokens: PackedTokens) -> None:
        """Do nothing: the loss needs no more streams."""

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """Return -log sigmoid(chosen - rejected - margin) + center * (chosen + rejected)^2 of each
        pair."""
        assert tokens.scores is not None, "a reward model gives scores"
        scores = tokens.sum_by_sequence(tokens.scores)
        chosen, rejected = scores.view(-1, 2).unbind(1)
        margin = tokens.sum_by_sequence(tokens[_MARGIN]).view(-1, 2)[:, 0]
        losses = -torch.nn.functional.logsigmoid(chosen - rejected - margin)
        if self.settings.center_coef:
            losses = losses + self.settings.center_coef * (chosen + rejected).square()

        def of_pairs(values: torch.Tensor) -> torch.Tensor:
            """Spread [pairs] -> [S]; a sequence has one token on the mask."""
            return tokens.spread(values.repeat_interleave(2) * 0.5)

        shown = {
            "pair_accuracy": (chosen > rejected).float(),
            "score_margin": chosen - rejected,
            "score_chosen": chosen,
            "score_rejected": rejected,
        }
        return TokenLoss(
            loss=of_pairs(losses),
            figures={
                name: Figure(of_pairs(values.detach()), Reduce.LOSS)
                for name, values in shown.items()
            },
        )


def scored_sequence(token_ids: Sequence[int], *, group: int, margin: float = 0.0) -> TrainSequence:
    """Return a sequence whose score is read at its last token."""
    tokens = np.asarray(token_ids, np.int32)
    mask = np.zeros(len(tokens) + 1, np.bool_)
    mask[-1] = True
    return TrainSequence(
        token_ids=np.append(tokens, np.int32(_AFTER)),
        loss_mask=mask,
        streams={_MARGIN: np.where(mask, np.float32(margin), np.float32(0.0))},
        token_weight=1.0,
        share=0.5,
        group=group,
    )


class Value:
    """Implements Objective for a model that gives scores, on the tokens of a policy's step, whose
    objective has set VALUES and RETURNS."""

    needs: frozenset[Stream] = frozenset()
    of_scores = True

    def __init__(self, *, recipe: Recipe) -> None:
        """Take the settings from `train.critic` of the recipe."""
        self.settings = recipe.train.critic

    def sequences(self, items: Sequence[Group]) -> list[TrainSequence]:
        """Raise NotImplementedError: the critic trains on the policy's sequences."""
        raise NotImplementedError("a critic learns from the tokens of the policy's step")

    def complete(self, tokens: PackedTokens) -> None:
        """Do nothing: the policy's objective has set the streams."""

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """Return 0.5 max((V - R)^2, (V_clipped - R)^2); V_clipped is V clipped to within `clip` of
        the value before the step."""
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
