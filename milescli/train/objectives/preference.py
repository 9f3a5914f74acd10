"""Objectives that learn from preferences: a pair of responses, of which one was chosen (DPO and its
family), or responses that were judged alone (KTO)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from milescli.core.types import Pair, Trajectory
from milescli.data.chat_masks import truncated
from milescli.platform.lazy import torch
from milescli.recipe.schema import Recipe
from milescli.recipe.train import REFERENCE_FREE, Preference
from milescli.train.base import Figure, Reduce, TokenLoss, TrainSequence, sequence_of
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream

_KIND, _BASELINE = "kto.kind", "kto.baseline"
_GOOD, _BAD, _MISMATCHED = 1.0, -1.0, 0.0


class Kto:
    """Implements Objective over judged responses; a pair counts as two. As in the paper, the
    policy's divergence from the reference is estimated on mismatched examples, which join responses
    of the step to prompts of other rows; they are scored and not trained on."""

    needs = frozenset({Stream.OLD, Stream.REFERENCE})
    takes = "pairs"

    def __init__(self, *, recipe: Recipe) -> None:
        """Take the weights from `train.preference` of the recipe."""
        self.settings = recipe.train.preference
        self._most = recipe.data.max_row_tokens

    def sequences(self, items: Sequence[Pair]) -> list[TrainSequence]:
        """Return one sequence for each side, then the mismatched ones, which are no longer than a
        row: the model may have no more positions."""
        judged = [
            (side, _GOOD if side is pair.chosen else _BAD) for pair in items for side in pair.sides
        ]
        made = [
            _sequence(side, kind=kind, number=number, weighs=True)
            for number, (side, kind) in enumerate(judged)
        ]
        return made + [
            _sequence(
                _joined(prompt, other, self._most), kind=_MISMATCHED, number=number, weighs=False
            )
            for number, (prompt, other) in enumerate(_mismatched(items))
        ]

    def complete(self, tokens: PackedTokens) -> None:
        """Estimate the KL: the mean of log pi - log pi_ref over the mismatched sequences, at least
        0."""
        count = tokens.sum_by_sequence(tokens.loss_mask).clamp(min=1.0)
        is_mismatched = tokens[_KIND] == _MISMATCHED
        share = torch.where(is_mismatched, 1.0, 0.0) * tokens.spread(1.0 / count)
        gap = torch.where(is_mismatched, tokens[Stream.OLD] - tokens[Stream.REFERENCE], 0.0)
        total = tokens.reduce(share, "sum").clamp(min=1e-9)
        baseline = (tokens.reduce(gap, "sum") / total).clamp(min=0.0)
        tokens[_BASELINE] = torch.ones_like(share) * baseline

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """Return weight * (1 - sigmoid(+-beta (reward - baseline))), spread over a response's
        tokens."""
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
    """Return (side, a side of the next row) for each side. A step of more rows than the file has
    contains a row twice: the next one is the next other row."""
    made = list[tuple[Trajectory, Trajectory]]()
    for number, pair in enumerate(items):
        others = (one for one in [*items[number:], *items[:number]] if one.index != pair.index)
        if (after := next(others, None)) is None:
            continue  # of the only row, every response is one to its own prompt
        made += [
            (side, after.sides[min(place, len(after.sides) - 1)])
            for place, side in enumerate(pair.sides)
        ]
    return made


def _joined(prompt: Trajectory, other: Trajectory, most: int) -> Trajectory:
    """Return the prompt of one trajectory joined with the response of the other, with the images of
    both, cut to at most `most` tokens."""
    start, begin = (side.loss_mask.index(1) for side in (prompt, other))
    moved = [
        replace(span, start=span.start - begin + start)
        for span in other.image_spans
        if span.start >= begin
    ]
    whole = Trajectory(
        token_ids=prompt.token_ids[:start] + other.token_ids[begin:],
        loss_mask=prompt.loss_mask[:start] + other.loss_mask[begin:],
        logprobs=prompt.logprobs[:start] + other.logprobs[begin:],
        version_spans=[],
        image_spans=(*(span for span in prompt.image_spans if span.start < start), *moved),
    )
    return truncated(whole, max(most, start + 1))


_MEAN_OF_SIDES = ("ipo", "sigmoid_norm", "simpo", "orpo")
"""Losses that take the mean log-prob of a response's tokens, not their sum."""


_IMITATE = ("orpo", "cpo")
"""Losses that add a term to imitate the chosen response."""


def objective(*, recipe: Recipe) -> Pairs | Kto:
    """Make the objective that `train.preference.loss` names."""
    return Kto(recipe=recipe) if recipe.train.preference.loss == "kto" else Pairs(recipe=recipe)


class Pairs:
    """Implements Objective over pairs. In a microbatch a chosen response stands right before the
    rejected one of its pair, since packing keeps units whole and in order."""

    takes = "pairs"

    def __init__(self, *, recipe: Recipe) -> None:
        """Take the loss from `train.preference` of the recipe."""
        self.settings = settings = recipe.train.preference
        self.compares = settings.loss not in REFERENCE_FREE
        live = self.compares and not recipe.caches_reference
        self.needs = frozenset({Stream.REFERENCE} if live else ())

    def sequences(self, items: Sequence[Pair]) -> list[TrainSequence]:
        """Return two sequences per pair, which form one unit."""
        return [sequence for pair in items for sequence in self._of_pair(pair)]

    def _of_pair(self, pair: Pair) -> Iterator[TrainSequence]:
        sides = pair.sides
        assert len(sides) == 2, f"row {pair.index + 1} is not a pair"
        for place, side in enumerate(sides):
            yield side_sequence(side, pair, place, share=0.5)

    def complete(self, tokens: PackedTokens) -> None:
        """Do nothing: the loss needs no more streams."""

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """Return the pair's loss, spread evenly over the trained tokens of both sides."""
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
        imitation = max(settings.sft_weight, float(settings.loss in _IMITATE))
        if imitation:
            losses = losses - imitation * (policy / count).view(-1, 2)[:, 0]

        def of_pairs(values: torch.Tensor) -> torch.Tensor:
            """Spread [pairs] -> [S], so that the loss weights give a mean over pairs."""
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
    """Return the sequence of one side of a pair, with the reference's log-probs if known."""
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
    """Return [pairs] the loss of DPO (arXiv 2305.18290, eq. 7), or of conservative DPO with
    `label_smoothing`. On log-probs per token it is sigmoid_norm; without a reference, CPO's."""
    return _smoothed(settings.beta * (chosen - rejected), settings)


def robust(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """Return [pairs] the loss of robust DPO (arXiv 2403.00409): unbiased if a share
    `label_smoothing` of the pairs is labelled the wrong way round."""
    margin, flipped = settings.beta * (chosen - rejected), settings.label_smoothing
    loss = flipped * logsigmoid(-margin) - (1.0 - flipped) * logsigmoid(margin)
    return loss / (1.0 - 2.0 * flipped)


def exo(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """Return [pairs] the loss of EXO (arXiv 2402.00856, eq. 16): the reverse KL from (1 -
    `label_smoothing`, `label_smoothing`) over the two responses."""
    margin, flipped = settings.beta * (chosen - rejected), settings.label_smoothing
    of_chosen = margin.sigmoid() * (logsigmoid(margin) - math.log1p(-flipped))
    return of_chosen + (-margin).sigmoid() * (logsigmoid(-margin) - math.log(flipped))


def nca(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """Return [pairs] the loss of NCA for pairs (arXiv 2402.05369)."""
    good, bad = settings.beta * chosen, settings.beta * rejected
    return -logsigmoid(good) - 0.5 * (logsigmoid(-good) + logsigmoid(-bad))


def bco(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """Return [pairs] the loss of BCO (arXiv 2404.04656) for pairs, without its shift of rewards."""
    return -logsigmoid(settings.beta * chosen) - logsigmoid(-settings.beta * rejected)


def sppo(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """Return [pairs] the loss of SPPO (arXiv 2405.00675, eq. 4.7) where the chosen response wins
    with probability 1; `beta` is 1 / eta."""
    goal = 0.5 / settings.beta
    return (chosen - goal).square() + (rejected + goal).square()


def apo_zero(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """Return [pairs] the loss of APO-zero (arXiv 2408.06266, eq. 7), for chosen responses that are
    better than the model's own."""
    return (-settings.beta * chosen).sigmoid() + (settings.beta * rejected).sigmoid()


def apo_down(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """Return [pairs] the loss of APO-down (arXiv 2408.06266, eq. 8), for chosen responses that are
    worse than the model's own."""
    margin = settings.beta * (chosen - rejected)
    return (settings.beta * chosen).sigmoid() + (-margin).sigmoid()


def hinge(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """Return [pairs] SLiC-HF's hinge loss on DPO's reward (arXiv 2309.06657, eq. 8)."""
    return torch.relu(1.0 - settings.beta * (chosen - rejected))


def ipo(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """Return [pairs] the loss of IPO (arXiv 2310.12036, eq. 17) on log-probs per token."""
    return (chosen - rejected - 0.5 / settings.beta).square()


def simpo(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """Return [pairs] the loss of SimPO (arXiv 2405.14734, eq. 6)."""
    return _smoothed(settings.beta * (chosen - rejected) - settings.gamma, settings)


def orpo(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """Return [pairs] ORPO's odds-ratio loss (arXiv 2403.07691, eq. 6 and 7) times beta; the caller
    adds the imitation of the chosen response."""
    odds = (chosen - log_one_minus_exp(chosen)) - (rejected - log_one_minus_exp(rejected))
    return -settings.beta * logsigmoid(odds)


def logsigmoid(values: torch.Tensor) -> torch.Tensor:
    """Return log(1 / (1 + exp(-values)))."""
    return torch.nn.functional.logsigmoid(values)


def log_one_minus_exp(logprob: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for x < 0 without loss of precision."""
    logprob = logprob.clamp(max=-1e-7)
    small = torch.log1p(-logprob.exp())
    return torch.where(logprob > -0.6931, torch.log(-torch.expm1(logprob)), small)


def _smoothed(margin: torch.Tensor, settings: Preference) -> torch.Tensor:
    flipped = settings.label_smoothing
    loss = -(1.0 - flipped) * logsigmoid(margin)
    return loss - flipped * logsigmoid(-margin) if flipped else loss


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, Preference], torch.Tensor]] = {
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "exo": exo,
    "nca": nca,
    "bco": bco,
    "sppo": sppo,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "simpo": simpo,
    "cpo": sigmoid,  # arXiv 2401.08417
    "orpo": orpo,
}
"""(scores of chosen, of rejected responses, settings) -> loss of each pair. A score is log pi - log
pi_ref of the response, or its mean per token."""
