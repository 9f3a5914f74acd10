"""Corrects for the difference between the trainer's policy and the policy that sampled.
`train.correction.kind` names a correction: built in here, an entry point, or an import path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from milescli.platform.lazy import torch
from milescli.recipe.train import Train
from milescli.train.kl import MAX_LOG_RATIO, binary_kl
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream, require_per_position


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Holds the weights and figures of a correction, [S] each, at the positions of this rank."""

    weights: torch.Tensor
    """Factor of each token's surrogate loss. The divisor of the mean does not change."""
    figures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Metrics, shown as means over the trained tokens."""


class CorrectionFn(Protocol):
    """Defines a plug-in of `train.correction.kind`. Called once per step, with all tokens of this
    rank."""

    def __call__(
        self, *, log_ratio: torch.Tensor, tokens: PackedTokens, settings: Train
    ) -> Correction:
        """Return weights and metrics. `log_ratio` [S]: log pi_old of the trainer - log pi of the
        engine that sampled."""
        ...


def apply_correction(
    correction: CorrectionFn, *, log_ratio: torch.Tensor, tokens: PackedTokens, settings: Train
) -> Correction:
    """Call the correction, and return its result. Raises RecipeError if that is not one weight for
    each position."""
    made = correction(log_ratio=log_ratio, tokens=tokens, settings=settings)
    values = made.weights if isinstance(made, Correction) else None
    require_per_position(
        correction, values, made, kind="correction", of="weights", count=len(log_ratio)
    )
    return made


# --- the correction that is built in

_SMALLEST_MEAN = 1e-8
"""Floor of the mean weight: if all weights of a step are 0, they stay 0."""


def importance(*, log_ratio: torch.Tensor, tokens: PackedTokens, settings: Train) -> Correction:
    """w = pi_trainer / pi_engine of each token, of its sequence (the product), or its sequence's
    geometric mean, by `correction.level`; bounded by `correction.mode`: truncate: min(w, high)
    (TIS, fengyao.notion.site/off-policy-rl); clip: between low and high; mask: 0 outside of [low,
    high] (IcePop, arXiv 2510.18855); binary_kl: 0 for a token whose max(KL(p || q), KL(q || p)) is
    above `high`, with p and q its probability by trainer and engine, and all other tokens taken as
    one (KPop, ringtech.notion.site/kpop); none: 1. Then, by their settings: divided by its mean
    over the step; 0 for sequences with a token below `veto`; 0 where the ratio at `reject_level` is
    outside of [reject_low, reject_high]."""
    rule = settings.correction
    ratio = _ratio(log_ratio, rule.level, tokens)
    if rule.mode == "binary_kl":
        weights = torch.where(_binary_divergence(log_ratio, tokens) <= rule.high, ratio, 0.0)
    else:
        weights = {
            "truncate": ratio.clamp(max=rule.high),
            "clip": ratio.clamp(rule.low, rule.high),
            "mask": torch.where(_is_within(ratio, rule.low, rule.high), ratio, 0.0),
            "none": torch.ones_like(ratio),
        }[rule.mode]
    if rule.normalize:
        mean = _mean(weights, tokens, by_token=rule.level == "token")
        weights = weights / mean.clamp(min=_SMALLEST_MEAN)
    is_accepted = torch.ones_like(tokens.loss_mask)
    if rule.veto is not None:
        is_low = (log_ratio.exp() < rule.veto) & tokens.loss_mask
        is_accepted &= tokens.spread(tokens.sum_by_sequence(is_low)) == 0
    if rule.reject_level != "none":
        judged = _ratio(log_ratio, rule.reject_level, tokens)
        is_accepted &= _is_within(judged, rule.reject_low, rule.reject_high)
    return Correction(
        weights=weights * is_accepted,
        figures={
            "correction_ratio": ratio,
            "correction_bounded": (weights == 0).float()
            if rule.mode in ("mask", "binary_kl")
            else (~_is_within(ratio, rule.low, rule.high)).float(),
            "correction_rejected": (~is_accepted).float(),
        },
    )


def _ratio(log_ratio: torch.Tensor, level: str, tokens: PackedTokens) -> torch.Tensor:
    """Return [S] the ratio at a level, with its logarithm clamped to +-MAX_LOG_RATIO."""
    if level != "token":
        total = tokens.sum_by_sequence(log_ratio)
        if level == "geometric":
            total = total / tokens.sum_by_sequence(tokens.loss_mask).clamp(min=1.0)
        log_ratio = tokens.spread(total)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _binary_divergence(log_ratio: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
    """Return [S] the larger of the two binary divergences between trainer and engine."""
    engine = tokens[Stream.ENGINE]
    trainer = engine + log_ratio
    return torch.maximum(binary_kl(trainer, engine), binary_kl(engine, trainer))


def _is_within(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (ratio >= low) & (ratio <= high)


def _mean(weights: torch.Tensor, tokens: PackedTokens, *, by_token: bool) -> torch.Tensor:
    """Return the mean over the trained tokens of the step, or over its sequences, each counted
    once."""
    if by_token:
        return tokens.reduce(weights, "mean")
    share = tokens.spread(1.0 / tokens.sum_by_sequence(tokens.loss_mask).clamp(min=1.0))
    return tokens.reduce(weights * share, "sum") / tokens.reduce(share, "sum")
