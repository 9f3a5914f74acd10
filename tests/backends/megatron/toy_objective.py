"""A sequence-level objective that nothing else uses: a ratio of whole sequences, a scan over whole
sequences, and means over all ranks. It exists to show that layouts change none of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from milescli.core.types import Group
from milescli.recipe.schema import Recipe
from milescli.train.base import Figure, Reduce, TokenLoss, TrainSequence, sequence_of
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream

DISCOUNT = 0.9
REWARD = "reward"
"""A stream of its own."""


class Toy:
    """Rewards at the last token, less the KL on the way, discounted from the end and whitened."""

    needs = frozenset({Stream.OLD, Stream.REFERENCE})

    def __init__(self, *, recipe: Recipe) -> None:
        """Nothing of the recipe changes it."""

    def sequences(self, items: Sequence[Group]) -> list[TrainSequence]:
        """The reward stands on the last trained token."""
        made = []
        for number, group in enumerate(items):
            for sample in group.samples:
                (trajectory,) = sample.trajectories
                rewards = np.zeros(trajectory.num_tokens, np.float32)
                if trained := np.flatnonzero(
                    np.frombuffer(trajectory.loss_mask, np.bool_)
                ).tolist():
                    rewards[trained[-1]] = sample.reward
                made.append(
                    sequence_of(
                        trajectory,
                        streams={REWARD: rewards},
                        token_weight=1.0 / max(trajectory.num_loss_tokens, 1),
                        share=1.0,
                        group=number,
                    )
                )
        return made

    def complete(self, tokens: PackedTokens) -> None:
        """Returns from the end, whitened over all ranks."""
        kl = torch.where(tokens.loss_mask, tokens[Stream.OLD] - tokens[Stream.REFERENCE], 0.0)
        gained = tokens.whole_sequences(tokens[REWARD] - 0.1 * kl)
        returns, running = torch.zeros_like(gained), torch.zeros(len(gained))
        for column in range(gained.shape[1] - 1, -1, -1):
            running = gained[:, column] + DISCOUNT * running
            returns[:, column] = running
        own = tokens.own_part(returns)
        mean, largest = tokens.reduce(own, "mean"), tokens.reduce(own.abs(), "max")
        tokens[Stream.ADVANTAGE] = (own - mean) / (1 + largest)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """-(sequence ratio) x advantage, with a term that couples every token to those before
        it."""
        log_ratio = tokens.logprobs - tokens[Stream.OLD]
        num_tokens = tokens.sum_by_sequence(torch.ones_like(log_ratio)).clamp(min=1)
        ratio = tokens.spread((tokens.sum_by_sequence(log_ratio) / num_tokens).exp())
        kept = torch.where(tokens.loss_mask, tokens.logprobs, 0.0)
        so_far = tokens.own_part(tokens.whole_sequences(kept).cumsum(dim=1))
        loss = -ratio * tokens[Stream.ADVANTAGE] + 1e-3 * so_far.square()
        return TokenLoss(
            loss=loss,
            figures={
                "ratio_mean": Figure(ratio),
                "so_far_max": Figure(so_far.abs(), Reduce.MAX),
                "policy_loss": Figure(loss.detach(), Reduce.LOSS),
            },
        )
