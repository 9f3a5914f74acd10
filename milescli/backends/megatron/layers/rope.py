"""Rotary embedding: the angles of positions, from the facts of a model. Pure; used by every kind of attention of this room."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from milescli.models.facts import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Angles:
    """Of the S positions of a row, shared by all layers that rotate alike."""

    cos: torch.Tensor
    """[S, 1, rotated dims / 2] float32, with the scaling's factor on it"""
    sin: torch.Tensor
    interleaved: bool


def angles(rope: Rope, positions: torch.Tensor, *, head_dim: int, device: torch.device) -> Angles:
    """RoFormer, arXiv 2104.09864. `head_dim`: of the vectors that are rotated; `rope.share` of it takes part."""
    rotated = int(head_dim * rope.share)
    inverse = inverse_frequencies(rope, rotated)
    found = torch.outer(positions.float(), inverse)[:, None, :].to(device)
    return Angles(cos=found.cos(), sin=found.sin(), interleaved=rope.interleaved)


def inverse_frequencies(rope: Rope, rotated: int) -> torch.Tensor:
    """[rotated / 2] float32, radians per position."""
    return 1.0 / rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)


class _Rotate(torch.autograd.Function):
    """Its gradient is the rotation back."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, ctx.interleaved), None, None, None


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """x [S, heads, d]; computed in float32. Dims beyond the rotated ones pass through."""
    rotated = 2 * angles.cos.shape[-1]
    if rotated == x.shape[-1]:
        return _Rotate.apply(x, angles.cos, angles.sin, angles.interleaved)
    turned = _Rotate.apply(x[..., :rotated], angles.cos, angles.sin, angles.interleaved)
    return torch.cat([turned, x[..., rotated:]], dim=-1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [S, heads, d], cos and sin [S, 1, d / 2]"""
    wide = x.float()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if interleaved:
        (first, second), (out_first, out_second) = (wide[..., ::2], wide[..., 1::2]), (out[..., ::2], out[..., 1::2])
    else:
        (first, second), (out_first, out_second) = wide.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out.to(x.dtype)
