"""Seeded sampling on a CPU: SGLang's Gumbel sampler with its hash in plain torch, for the attention backend that runs here.

A token depends on its logits, the request's seed and its position alone: not on the batch, nor on when the request came.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def install() -> None:
    """Let `--enable-deterministic-inference` run with torch_native; without it SGLang ignores a request's seed."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers import sampler
    from sglang.srt.model_executor.model_runner import ModelRunner

    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.add_deterministic_attention_backend_choices(["torch_native"])
    ModelRunner.maybe_enable_batch_invariant_mode = _kernels_are_for_gpus
    sampler.murmur_hash32 = murmur_hash32


def _kernels_are_for_gpus(self: object) -> None:
    """The batch-invariant kernels are Triton; torch's CPU kernels agree across batches to about 1e-6."""


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = (word * 0xCC9E2D51) & _MASK
    word = (_rotate(word, 15) * 0x1B873593) & _MASK
    return (_rotate(state ^ word, 13) * 5 + 0xE6546B64) & _MASK


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """[rows, columns] int64 holding uint32: MurmurHash3 over the blocks (seed low, seed high, position, column).

    `seed`: [rows] 64 bit; `positions`: [rows]; `col_indices`: [columns]. Int64 arithmetic wraps, and the mask keeps 32 bits.
    """
    seed_R = seed.to(torch.int64)
    state_R = _mix(torch.zeros_like(seed_R), seed_R & _MASK)
    state_R = _mix(state_R, (seed_R >> 32) & _MASK)
    state_R = _mix(state_R, positions.to(torch.int64) & _MASK)
    state = _mix(state_R[:, None], col_indices.to(torch.int64)[None] & _MASK) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)
