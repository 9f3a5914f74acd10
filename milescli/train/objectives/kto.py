"""KTO: learning from responses that were judged alone (arXiv 2402.01306)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from milescli.core.types import Pair, Trajectory
from milescli.recipe.schema import Recipe
from milescli.train.base import Figure, Reduce, TokenLoss, TrainSequence
from milescli.train.packed_tokens import PackedTokens
from milescli.train.sequences import sequence_of
from milescli.train.streams import Stream

_KIND, _BASELINE = "kto.kind", "kto.baseline"
_GOOD, _BAD, _MISMATCHED = 1.0, -1.0, 0.0


class Kto:
    """An Objective over judged responses; a pair is two of them. How far the policy is from the
    reference is estimated, as in the paper, by responses of the step beside prompts of other rows:
    they are scored, and nothing is learned of them."""

    needs = frozenset({Stream.OLD, Stream.REFERENCE})
    takes = "pairs"

    def __init__(self, *, recipe: Recipe) -> None:
        """`train.preference` of the recipe sets the weights."""
        self.settings = recipe.train.preference

    def sequences(self, items: Sequence[Pair]) -> list[TrainSequence]:
        """One for each side, then the mismatched ones."""
        judged = [
            (side, _GOOD if side is pair.chosen else _BAD) for pair in items for side in pair.sides
        ]
        made = [
            _sequence(side, kind=kind, number=number, weighs=True)
            for number, (side, kind) in enumerate(judged)
        ]
        return made + [
            _sequence(_beside(prompt, other), kind=_MISMATCHED, number=number, weighs=False)
            for number, (prompt, other) in enumerate(_mismatched(items))
        ]

    def complete(self, tokens: PackedTokens) -> None:
        """The estimate of the KL: mean over the mismatched of log pi - log pi_ref, 0 at least."""
        count = tokens.sum_by_sequence(tokens.loss_mask).clamp(min=1.0)
        is_mismatched = tokens[_KIND] == _MISMATCHED
        share = torch.where(is_mismatched, 1.0, 0.0) * tokens.spread(1.0 / count)
        gap = torch.where(is_mismatched, tokens[Stream.OLD] - tokens[Stream.REFERENCE], 0.0)
        total = tokens.reduce(share, "sum").clamp(min=1e-9)
        baseline = (tokens.reduce(gap, "sum") / total).clamp(min=0.0)
        tokens[_BASELINE] = torch.ones_like(share) * baseline

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """weight * (1 - sigmoid(+-beta (reward - baseline))), spread over a response's tokens."""
        assert tokens.logprobs is not None and tokens.entropy is not None
        settings, count = self.settings, tokens.sum_by_sequence(tokens.loss_mask).clamp(min=1.0)
        score = tokens.sum_by_sequence(tokens.logprobs - tokens[Stream.REFERENCE])
        kind = tokens.sum_by_sequence(tokens[_KIND]) / count
        baseline = tokens.sum_by_sequence(tokens[_BASELINE]) / count
        good = kind > 0
        value = torch.sigmoid(settings.beta * torch.where(good, 1.0, -1.0) * (score - baseline))
        weight = torch.where(good, settings.desirable_weight, settings.undesirable_weight)

        def of_samples(values: torch.Tensor) -> torch.Tensor:
            return tokens.spread(values / count)

        reward = settings.beta * score.detach()
        return TokenLoss(
            loss=of_samples(weight * (1.0 - value)),
            figures={
                "reward_good": Figure(of_samples(torch.where(good, reward, 0.0)), Reduce.LOSS),
                "reward_bad": Figure(of_samples(torch.where(good, 0.0, reward)), Reduce.LOSS),
                "kl": Figure(of_samples(baseline), Reduce.LOSS),
                "entropy": Figure(tokens.entropy.detach()),
            },
        )


def _sequence(side: Trajectory, *, kind: float, number: int, weighs: bool) -> TrainSequence:
    made = sequence_of(
        side,
        streams={_KIND: np.full(side.num_tokens, kind, np.float32)},
        token_weight=float(weighs),
        share=float(weighs),
        group=0,
    )
    return replace(made, group=number)


def _mismatched(items: Sequence[Pair]) -> list[tuple[Trajectory, Trajectory]]:
    """(side, a side of the next row), for each side."""
    return [
        (side, after.sides[min(place, len(after.sides) - 1)])
        for pair, after in zip(items, [*items[1:], items[0]], strict=True)
        for place, side in enumerate(pair.sides)
    ]


def _beside(prompt: Trajectory, other: Trajectory) -> Trajectory:
    """The prompt of one with the response of the other."""
    start, begin = (side.loss_mask.index(1) for side in (prompt, other))
    return Trajectory(
        token_ids=prompt.token_ids[:start] + other.token_ids[begin:],
        loss_mask=prompt.loss_mask[:start] + other.loss_mask[begin:],
        logprobs=prompt.logprobs[:start] + other.logprobs[begin:],
        version_spans=[],
    )
