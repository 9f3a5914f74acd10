"""The few tokens that make entropy fall, held back: those whose log-prob goes with their advantage
most."""

from __future__ import annotations

import torch

from milescli.recipe.train import Train
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream
from milescli.train.surrogates import SurrogateTerms
from milescli.train.surrogates.clip import clip

CHOSEN = "covariance_chosen"
"""Stream: 1.0 at the tokens that are held back."""
_HALVINGS = 40
"""Of the interval that a threshold lies in: float32 has no finer one."""


class _Chosen:
    """Chooses tokens once a step, over all ranks: their share would depend on how the step was cut
    into microbatches otherwise."""

    needs = frozenset({Stream.OLD})

    def complete(self, tokens: PackedTokens, settings: Train) -> None:
        """cov = (A - mean A) (log pi_old - mean log pi_old), means over all trained tokens of the
        step (arXiv 2505.22617)."""
        advantages, logprobs = tokens[Stream.ADVANTAGE], tokens[Stream.OLD]
        covariance = (advantages - tokens.reduce(advantages, "mean")) * (
            logprobs - tokens.reduce(logprobs, "mean")
        )
        tokens[CHOSEN] = self.choose(covariance, tokens, settings).float()

    def choose(
        self, covariance: torch.Tensor, tokens: PackedTokens, settings: Train
    ) -> torch.Tensor:
        """[S] bool"""
        raise NotImplementedError


class ClipCov(_Chosen):
    """PPO's clip, without `covariance.fraction` of the tokens: drawn from those whose covariance is
    between `covariance.low` and `covariance.high` (Clip-Cov, arXiv 2505.22617)."""

    needs = frozenset({Stream.OLD, Stream.UNIFORM})

    def choose(
        self, covariance: torch.Tensor, tokens: PackedTokens, settings: Train
    ) -> torch.Tensor:
        """Drawn by the stream of random numbers that the driver has made."""
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
        """See the class."""
        terms = clip(log_ratio=log_ratio, advantages=advantages, tokens=tokens, settings=settings)
        held = tokens[CHOSEN]
        figures = {**terms.figures, "held_back_fraction": held}
        return SurrogateTerms(loss=terms.loss * (1.0 - held), figures=figures)


class KlCov(_Chosen):
    """-r A, plus `covariance.kl_coef` |log r| at `covariance.fraction` of the tokens: those of the
    largest covariance (KL-Cov, arXiv 2505.22617)."""

    def choose(
        self, covariance: torch.Tensor, tokens: PackedTokens, settings: Train
    ) -> torch.Tensor:
        """The top."""
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
        """See the class."""
        ratio, held = log_ratio.exp(), tokens[CHOSEN]
        penalty = settings.covariance.kl_coef * held * log_ratio.abs()
        return SurrogateTerms(
            loss=-ratio * advantages + penalty,
            figures={"ratio_mean": ratio.detach(), "held_back_fraction": held},
        )


def _threshold(values: torch.Tensor, tokens: PackedTokens, fraction: float) -> torch.Tensor:
    """The number that `fraction` of the step's trained tokens (one at least) are not below; found
    by halving, since the values lie on many ranks."""
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
