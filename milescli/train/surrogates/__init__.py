"""The term of the policy loss that contains the advantages. `train.surrogate` names one: built in
here, an entry point, or an import path."""

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
class SurrogateTerms:
    """Holds the terms of a surrogate, [S] each, at the positions of this rank."""

    loss: torch.Tensor
    figures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Metrics, shown as means over the trained tokens."""


class Surrogate(Protocol):
    """Defines a plug-in of `train.surrogate`. Two attributes are optional: `needs`, a frozenset of
    the `Stream`s that it requires, and `complete(tokens, settings)`, called once a step on all
    tokens of a rank to compute streams from streams."""

    def __call__(
        self,
        *,
        log_ratio: torch.Tensor,
        advantages: torch.Tensor,
        tokens: PackedTokens,
        settings: Train,
    ) -> SurrogateTerms:
        """Return the loss and metrics. `log_ratio` [S]: log pi - log pi_old, with gradient;
        `advantages` [S]; `tokens`: for sums over sequences."""
        ...


def compute_terms(
    surrogate: Surrogate,
    *,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    tokens: PackedTokens,
    settings: Train,
) -> SurrogateTerms:
    """Call the surrogate, and return its terms. Raises RecipeError if it does not return one loss
    for each position."""
    terms = surrogate(log_ratio=log_ratio, advantages=advantages, tokens=tokens, settings=settings)
    values = terms.loss if isinstance(terms, SurrogateTerms) else None
    require_per_position(
        surrogate, values, terms, kind="surrogate", of="a loss", count=len(log_ratio)
    )
    return terms


# --- the surrogates that are built in


def clip(
    *,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    tokens: PackedTokens,
    settings: Train,
) -> SurrogateTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi / pi_old; with `dual_clip` c,
    for A < 0 no more than -c A.

    PPO (arXiv 1707.06347, eq. 7) with the separate upper bound of DAPO (arXiv 2503.14476, eq. 10,
    "clip-higher") and the second bound of dual-clip PPO (arXiv 1912.09729, eq. 5): without it, a
    token of negative advantage that the policy came to like pulls with its whole ratio.
    """
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    ratio = torch.exp(log_ratio)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    figures = {"clip_fraction": clipped.float(), "ratio_mean": ratio.detach()}
    if settings.dual_clip is not None:
        bound = -settings.dual_clip * advantages
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        figures["dual_clip_fraction"] = bounded.float()
    return SurrogateTerms(loss=loss, figures=figures)


def reinforce(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """-A log pi (REINFORCE, Williams 1992; GPG, arXiv 2504.02546). No ratio: only correct for the
    policy that sampled."""
    return SurrogateTerms(loss=-advantages * tokens.logprobs)


def cispo(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi (CISPO of MiniMax-M1, arXiv
    2506.13585): a clipped token keeps a bounded gradient instead of none. sg: no gradient."""
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(low, high)
    return SurrogateTerms(
        loss=-weight * advantages * tokens.logprobs,
        figures={"clip_fraction": (weight != ratio).float(), "ratio_mean": ratio},
    )


def topr(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """-sg(w) A log pi; w = 1 where A >= 0, else min(1, ratio of the whole sequence) (TOPR, arXiv
    2503.14286): a bad response that has become unlikely already is pushed down no further."""
    whole = tokens.sum_by_sequence(log_ratio.detach()).clamp(-MAX_LOG_RATIO, 0.0)
    weight = torch.where(advantages < 0, tokens.spread(whole.exp()), 1.0)
    return SurrogateTerms(
        loss=-weight * advantages * tokens.logprobs, figures={"taper_mean": weight}
    )


def gmpo(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """-A exp(mean over the sequence of the clipped log r) (GMPO, arXiv 2507.20673). log r of each
    token is clipped at -clip_low and +clip_high, on the side to which its advantage drives it. The
    loss is that of the sequence, at each of its tokens: `sequence_mean` counts it once."""
    bounded = log_ratio.clamp(-settings.clip_low, settings.clip_high)
    low, high = torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded)
    clipped = torch.where(
        advantages > 0, low, torch.where(advantages < 0, high, torch.zeros_like(low))
    )
    count = tokens.sum_by_sequence(tokens.loss_mask).clamp(min=1.0)
    ratio = tokens.spread((tokens.sum_by_sequence(clipped) / count).exp())
    mean_advantage = tokens.spread(tokens.sum_by_sequence(advantages) / count)
    return SurrogateTerms(
        loss=-ratio * mean_advantage,
        figures={
            "clip_fraction": (log_ratio != clipped).float() * (advantages != 0),
            "ratio_mean": ratio.detach(),
        },
    )


def sapo(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """-f(r) A with f(r) = 4 sigmoid(tau (r - 1)) / tau; tau = `soft_clip.positive` where A > 0,
    else `soft_clip.negative` (SAPO, arXiv 2511.20347). Its slope at r = 1 is that of r, and
    falls on both sides."""
    soft = settings.soft_clip
    ratio = log_ratio.exp()
    tau = torch.where(advantages > 0, soft.positive, soft.negative)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return SurrogateTerms(loss=-gate * advantages, figures={"ratio_mean": ratio.detach()})


MAX_WEIGHT = 20.0
"""Bound on the ratio that weights a token, as in the authors' own runs."""


def dppo_tv(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """-sg(min(r, 20)) A log pi, and 0 where the token's probability has already moved by more than
    clip_high (A > 0: up) or clip_low (A <= 0: down): DPPO with the binary total variation |pi -
    pi_old| (arXiv 2602.04879)."""
    new, old = _probabilities(log_ratio, tokens)
    moved = new - old
    is_near = torch.where(advantages > 0, moved <= settings.clip_high, moved >= -settings.clip_low)
    return _masked(log_ratio, advantages, tokens, is_near)


def dppo_kl(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """As `dppo_tv`, bounded by the binary divergence KL(pi_old || pi) = q log(q / p) + (1 - q)
    log((1 - q) / (1 - p)); p, q: probability of the token now and before (arXiv
    2602.04879)."""
    assert tokens.logprobs is not None
    new, move = tokens.logprobs.detach(), log_ratio.detach()
    divergence = binary_kl(new - move, new)
    rising = (divergence <= settings.clip_high) | (move <= 0)
    falling = (divergence <= settings.clip_low) | (move >= 0)
    return _masked(log_ratio, advantages, tokens, torch.where(advantages > 0, rising, falling))


def _probabilities(
    log_ratio: torch.Tensor, tokens: PackedTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [S] the probability of each token under the policy, and under the old one."""
    assert tokens.logprobs is not None
    now = tokens.logprobs.detach()
    return now.exp(), (now - log_ratio.detach()).exp()


def _masked(
    log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, is_near: torch.Tensor
) -> SurrogateTerms:
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(max=MAX_WEIGHT) * is_near
    return SurrogateTerms(
        loss=-weight * advantages * tokens.logprobs,
        figures={"clip_fraction": (~is_near).float(), "ratio_mean": ratio},
    )


CHOSEN = "covariance_chosen"
"""Stream: 1.0 at the chosen tokens, which are held back."""
_HALVINGS = 40
"""Halvings of the interval of a threshold: float32 has no finer one."""


class _TokenChoice:
    """Chooses tokens once a step over all ranks, so that their share does not depend on the split
    into microbatches."""

    needs = frozenset({Stream.OLD})

    def complete(self, tokens: PackedTokens, settings: Train) -> None:
        """Compute cov = (A - mean A) (log pi_old - mean log pi_old), with means over all trained
        tokens of the step (arXiv 2505.22617), and choose tokens by it."""
        advantages, logprobs = tokens[Stream.ADVANTAGE], tokens[Stream.OLD]
        covariance = (advantages - tokens.reduce(advantages, "mean")) * (
            logprobs - tokens.reduce(logprobs, "mean")
        )
        tokens[CHOSEN] = self.choose(covariance, tokens, settings).float()

    def choose(
        self, covariance: torch.Tensor, tokens: PackedTokens, settings: Train
    ) -> torch.Tensor:
        """Return [S] bool, True for chosen tokens."""
        raise NotImplementedError


class ClipCov(_TokenChoice):
    """PPO's clip, without `covariance.fraction` of the tokens: drawn from those whose covariance is
    between `covariance.low` and `covariance.high` (Clip-Cov, arXiv 2505.22617)."""

    needs = frozenset({Stream.OLD, Stream.UNIFORM})

    def choose(
        self, covariance: torch.Tensor, tokens: PackedTokens, settings: Train
    ) -> torch.Tensor:
        """Draw tokens with the random numbers that the driver has made."""
        bounds = settings.covariance
        is_between = (covariance > bounds.low) & (covariance < bounds.high) & tokens.loss_mask
        draw = torch.where(is_between, tokens[Stream.UNIFORM], -1.0)
        return is_between & (draw >= _threshold(draw, tokens, bounds.fraction))

    def __call__(
        self,
        *,
        log_ratio: torch.Tensor,
        advantages: torch.Tensor,
        tokens: PackedTokens,
        settings: Train,
    ) -> SurrogateTerms:
        """Return PPO's clipped loss without the chosen tokens."""
        terms = clip(log_ratio=log_ratio, advantages=advantages, tokens=tokens, settings=settings)
        chosen = tokens[CHOSEN]
        figures = {**terms.figures, "held_back_fraction": chosen}
        return SurrogateTerms(loss=terms.loss * (1.0 - chosen), figures=figures)


class KlCov(_TokenChoice):
    """-r A, plus `covariance.kl_coef` |log r| at `covariance.fraction` of the tokens: those of the
    largest covariance (KL-Cov, arXiv 2505.22617)."""

    def choose(
        self, covariance: torch.Tensor, tokens: PackedTokens, settings: Train
    ) -> torch.Tensor:
        """Choose the tokens of the largest covariance."""
        limit = _threshold(covariance, tokens, settings.covariance.fraction)
        return (covariance >= limit) & tokens.loss_mask

    def __call__(
        self,
        *,
        log_ratio: torch.Tensor,
        advantages: torch.Tensor,
        tokens: PackedTokens,
        settings: Train,
    ) -> SurrogateTerms:
        """Return -r A, with the penalty at the chosen tokens."""
        ratio, chosen = log_ratio.exp(), tokens[CHOSEN]
        penalty = settings.covariance.kl_coef * chosen * log_ratio.abs()
        return SurrogateTerms(
            loss=-ratio * advantages + penalty,
            figures={"ratio_mean": ratio.detach(), "held_back_fraction": chosen},
        )


def _threshold(values: torch.Tensor, tokens: PackedTokens, fraction: float) -> torch.Tensor:
    """Return the largest number that at least `fraction` of the step's trained tokens (at least
    one) are not below; found by bisection, since the values are on many ranks."""
    one = torch.ones_like(values)
    wanted = torch.floor(fraction * tokens.reduce(one, "sum")).clamp(min=1.0)
    high = tokens.reduce(values, "max")
    low = -tokens.reduce(-values, "max")
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if tokens.reduce((values >= middle).float(), "sum") >= wanted:
            low = middle
        else:
            high = middle
    return low


clip_cov = ClipCov()
kl_cov = KlCov()
