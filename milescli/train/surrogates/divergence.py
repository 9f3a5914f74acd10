"""Trust regions by what the policy's probabilities became, not by their ratio."""

from __future__ import annotations

import torch

from milescli.recipe.train import Train
from milescli.train.packed_tokens import PackedTokens
from milescli.train.surrogates import SurrogateTerms

MAX_WEIGHT = 20.0
"""Bound on the ratio that weighs a token, as in the authors' own runs."""
_TINY = 1e-8


def dppo_tv(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """-sg(min(r, 20)) A log pi, and nothing where the token's probability has already moved by more
    than clip_high (A > 0: up) or clip_low (A <= 0: down): DPPO with the binary total variation
    |pi - pi_old| (arXiv 2602.04879)."""
    new, old = _probabilities(log_ratio, tokens)
    moved = new - old
    is_kept = torch.where(advantages > 0, moved <= settings.clip_high, moved >= -settings.clip_low)
    return _masked(log_ratio, advantages, tokens, is_kept)


def dppo_kl(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """As `dppo_tv`, bounded by the binary divergence KL(pi_old || pi) = q log(q / p) + (1 - q)
    log((1 - q) / (1 - p)); p, q: probability of the token now and before (arXiv
    2602.04879)."""
    new, old = _probabilities(log_ratio, tokens)
    rest = torch.log((1.0 - old + _TINY) / (1.0 - new + _TINY))
    divergence = -old * log_ratio.detach() + (1.0 - old) * rest
    rising = (divergence <= settings.clip_high) | (new <= old)
    falling = (divergence <= settings.clip_low) | (new >= old)
    return _masked(log_ratio, advantages, tokens, torch.where(advantages > 0, rising, falling))


def _probabilities(
    log_ratio: torch.Tensor, tokens: PackedTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """[S] of each token by the policy, and by the old one."""
    assert tokens.logprobs is not None
    now = tokens.logprobs.detach()
    return now.exp(), (now - log_ratio.detach()).exp()


def _masked(
    log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, is_kept: torch.Tensor
) -> SurrogateTerms:
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(max=MAX_WEIGHT) * is_kept
    return SurrogateTerms(
        loss=-weight * advantages * tokens.logprobs,
        figures={"clip_fraction": (~is_kept).float(), "ratio_mean": ratio},
    )
