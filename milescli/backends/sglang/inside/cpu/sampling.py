"""Seeded sampling on a CPU: one uniform number per token, hashed from the request's seed and the
token's position, through the CDF.

A token depends on its logits, seed and position alone: not on the batch, nor on when its request
came. SGLang's own way draws one number per vocabulary entry, by a kernel that has no CPU wheel,
inside a function that torch.compile would build in C++ at first use.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def install() -> None:
    """Enable `--enable-deterministic-inference` with torch_native; without it SGLang ignores a
    request's seed."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers import sampler
    from sglang.srt.model_executor.model_runner import ModelRunner

    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.add_deterministic_attention_backend_choices(["torch_native"])
    ModelRunner.maybe_enable_batch_invariant_mode = _kernels_are_for_gpus

    unseeded = sampler.sampling_from_probs_torch

    def sampling_from_probs(probs, sampling_seed=None, positions=None):
        if sampling_seed is None:
            return unseeded(probs)
        return sample(probs, sampling_seed, positions).to(torch.int32)

    sampler.sampling_from_probs_torch = sampling_from_probs
    unseeded_few = sampler.top_k_top_p_min_p_sampling_from_probs_torch

    def sampling_from_few(
        probs, top_ks, top_ps, min_ps, need_min_p, sampling_seed, positions, **settings
    ):
        if sampling_seed is None or need_min_p or settings.get("return_filtered_probs"):
            arguments = (probs, top_ks, top_ps, min_ps, need_min_p, sampling_seed, positions)
            return unseeded_few(*arguments, **settings)
        few = likeliest(probs, top_ks, top_ps)
        return sample(few, sampling_seed, positions).to(torch.int32)

    sampler.top_k_top_p_min_p_sampling_from_probs_torch = sampling_from_few
    sampler.multinomial_with_seed = sample_from_logprobs


def _kernels_are_for_gpus(self: object) -> None:
    """The batch-invariant kernels are Triton; torch's CPU kernels agree across batches to about
    1e-6."""


def sample(
    weights_BV: torch.Tensor, seeds_B: torch.Tensor, positions_B: torch.Tensor
) -> torch.Tensor:
    """Return [batch] int64: index i with probability weights[i] / sum(weights), by inverse
    transform. A zero weight is never chosen."""
    cumulative_BV = weights_BV.to(torch.float64).cumsum(-1)
    target_B1 = uniform(seeds_B, positions_B)[:, None] * cumulative_BV[:, -1:]
    return (
        torch.searchsorted(cumulative_BV, target_B1, right=True)
        .squeeze(1)
        .clamp_(max=weights_BV.shape[-1] - 1)
    )


def likeliest(
    probs_BV: torch.Tensor, top_ks_B: torch.Tensor, top_ps_B: torch.Tensor
) -> torch.Tensor:
    """Return [batch, vocabulary] the probabilities of each row's `top_k` likeliest tokens, as many
    of them as reach `top_p` together; 0 elsewhere. They are in the vocabulary's order: SGLang draws
    in the order of probabilities, so that a token would depend on whether another request in the
    batch has a bound."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    rank_V = torch.arange(probs_BV.shape[-1], device=probs_BV.device)
    is_out_BV = (rank_V >= top_ks_B[:, None]) | (
        (before_BV > top_ps_B[:, None]) & (top_ps_B[:, None] < 1.0)
    )
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV.masked_fill(is_out_BV, 0.0))


def sample_from_logprobs(
    logprobs_BV: torch.Tensor, seeds_B: torch.Tensor, positions_B: torch.Tensor
) -> torch.Tensor:
    """Return [batch, 1] tokens from log-probs that need not be normalised (top-p and top-k leave
    -inf). Replaces multinomial_with_seed."""
    weights_BV = (logprobs_BV - logprobs_BV.amax(-1, keepdim=True)).exp_()
    return sample(weights_BV, seeds_B, positions_B)[:, None]


def uniform(seeds_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """Return [batch] float64 strictly between 0 and 1: MurmurHash3 (32 bit) over the blocks seed
    low, seed high, position.

    Integer arithmetic in int64, which wraps without harm: the mask keeps the low 32 bits."""
    seeds = seeds_B.to(torch.int64)
    state = _mix(torch.zeros_like(seeds), seeds & _MASK)
    state = _mix(state, (seeds >> 32) & _MASK)
    state = _mix(state, positions_B.to(torch.int64) & _MASK) ^ 12
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    state = state ^ (state >> 16)
    return (state.to(torch.float64) + 0.5) / 2.0**32


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = (word * 0xCC9E2D51) & _MASK
    word = (_rotate(word, 15) * 0x1B873593) & _MASK
    return (_rotate(state ^ word, 13) * 5 + 0xE6546B64) & _MASK


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK
