"""Learning from preferences: a pair of responses, of which one was chosen (DPO and its family), or
responses that were judged alone (KTO)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import logsigmoid, relu

from milescli.core.types import Pair, Trajectory
from milescli.recipe.schema import Recipe
from milescli.recipe.train import REFERENCE_FREE, Preference
from milescli.train.base import Figure, Reduce, TokenLoss, TrainSequence
from milescli.train.objectives.kto import Kto
from milescli.train.packed_tokens import PackedTokens
from milescli.train.sequences import sequence_of
from milescli.train.streams import Stream

_MEAN_OF_SIDES = ("ipo", *REFERENCE_FREE)
"""Losses that take the mean log-prob of a response's tokens, not their sum."""


def objective(*, recipe: Recipe) -> Pairs | Kto:
    """The one that `train.preference.loss` names."""
    return Kto(recipe=recipe) if recipe.train.preference.loss == "kto" else Pairs(recipe=recipe)


class Pairs:
    """An Objective over pairs. In a microbatch a chosen response stands right before the rejected
    one of its pair: packing keeps units whole and in order."""

    takes = "pairs"

    def __init__(self, *, recipe: Recipe) -> None:
        """`train.preference` of the recipe says which loss."""
        self.settings = settings = recipe.train.preference
        self.compares = settings.loss not in REFERENCE_FREE
        live = self.compares and not recipe.caches_reference
        self.needs = frozenset({Stream.REFERENCE} if live else ())

    def sequences(self, items: Sequence[Pair]) -> list[TrainSequence]:
        """Two for each pair, which are one unit."""
        return [sequence for pair in items for sequence in self._of_pair(pair)]

    def _of_pair(self, pair: Pair) -> Iterator[TrainSequence]:
        sides = pair.sides
        assert len(sides) == 2, f"row {pair.index + 1} is no pair"
        for place, side in enumerate(sides):
            yield side_sequence(side, pair, place, share=0.5)

    def complete(self, tokens: PackedTokens) -> None:
        """Nothing is missing."""

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """The pair's loss, spread evenly over the trained tokens of both sides."""
        assert tokens.logprobs is not None and tokens.entropy is not None
        settings, count = self.settings, tokens.sum_by_sequence(tokens.loss_mask).clamp(min=1.0)
        policy = tokens.sum_by_sequence(tokens.logprobs)
        reference = (
            tokens.sum_by_sequence(tokens[Stream.REFERENCE]) if self.compares else 0.0 * policy
        )
        score = policy - reference
        if settings.loss in _MEAN_OF_SIDES:
            score = score / count
        chosen, rejected = score.view(-1, 2).unbind(1)
        losses = LOSSES[settings.loss](chosen, rejected, settings)
        imitation = max(settings.sft_weight, float(settings.loss == "orpo"))
        if imitation:
            losses = losses - imitation * (policy / count).view(-1, 2)[:, 0]

        def of_pairs(values: torch.Tensor) -> torch.Tensor:
            """[pairs] -> [S], so that the loss's own weights make it a mean over pairs."""
            return tokens.spread(values.repeat_interleave(2) * 0.5 / count)

        rewards = {"chosen": settings.beta * chosen, "rejected": settings.beta * rejected}
        levels = policy.view(-1, 2).unbind(1)
        shown = {
            **{f"reward_{side}": values for side, values in rewards.items()},
            "reward_margin": rewards["chosen"] - rewards["rejected"],
            "pair_accuracy": (chosen > rejected).float(),
            "chosen_logprob": levels[0],
            "rejected_logprob": levels[1],
        }
        return TokenLoss(loss=of_pairs(losses), figures=_figures(shown, of_pairs, tokens))


def side_sequence(side: Trajectory, pair: Pair, place: int, *, share: float) -> TrainSequence:
    """One side of a pair, with the reference's log-probs where they are known."""
    streams: Mapping[str, np.ndarray] = {}
    if pair.references:
        streams = {Stream.REFERENCE: np.frombuffer(pair.references[place], np.float32)}
    made = sequence_of(side, streams=streams, token_weight=1.0, share=share, group=pair.index)
    return replace(made, unit=pair.index)


def _figures(
    shown: Mapping[str, torch.Tensor],
    of_pairs: Callable[[torch.Tensor], torch.Tensor],
    tokens: PackedTokens,
) -> dict[str, Figure]:
    assert tokens.entropy is not None
    return {
        **{name: Figure(of_pairs(values.detach()), Reduce.LOSS) for name, values in shown.items()},
        "entropy": Figure(tokens.entropy.detach()),
    }


def sigmoid(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """[pairs] DPO (arXiv 2305.18290, eq. 7); with `label_smoothing` conservative DPO."""
    return _smoothed(settings.beta * (chosen - rejected), settings)


def hinge(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """[pairs] SLiC-HF's hinge on DPO's reward (arXiv 2309.06657, eq. 8)."""
    return relu(1.0 - settings.beta * (chosen - rejected))


def ipo(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """[pairs] IPO (arXiv 2310.12036, eq. 17), of log-probs per token."""
    return (chosen - rejected - 0.5 / settings.beta).square()


def simpo(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """[pairs] SimPO (arXiv 2405.14734, eq. 6)."""
    return _smoothed(settings.beta * (chosen - rejected) - settings.gamma, settings)


def orpo(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """[pairs] the odds ratio of ORPO (arXiv 2403.07691, eq. 6 and 7), times beta; the imitation of
    the chosen response stands beside it."""
    odds = (chosen - log_not(chosen)) - (rejected - log_not(rejected))
    return -settings.beta * logsigmoid(odds)


def log_not(logprob: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x < 0, without loss of digits."""
    logprob = logprob.clamp(max=-1e-7)
    small = torch.log1p(-logprob.exp())
    return torch.where(logprob > -0.6931, torch.log(-torch.expm1(logprob)), small)


def _smoothed(margin: torch.Tensor, settings: Preference) -> torch.Tensor:
    flipped = settings.label_smoothing
    loss = -(1.0 - flipped) * logsigmoid(margin)
    return loss - flipped * logsigmoid(-margin) if flipped else loss


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, Preference], torch.Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
}
"""(scores of chosen, of rejected responses, settings) -> loss of each pair. A score is log pi - log
pi_ref of the response, or its mean per token."""
