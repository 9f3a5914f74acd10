"""Rotary embedding: the angles of positions, from the facts of a model. Pure; used by every kind of
attention of this package."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from milescli.models.facts import Rope, RopeScaling
from milescli.platform import cpu_kernels, exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Angles:
    """Holds the angles of the S positions of a row, shared by all layers with the same rotation."""

    cos: torch.Tensor
    """[S, 1, rotated dims / 2] float32, with the scaling's factor on it"""
    sin: torch.Tensor
    interleaved: bool


def angles(rope: Rope, positions: torch.Tensor, *, head_dim: int, device: torch.device) -> Angles:
    """Compute the angles (RoFormer, arXiv 2104.09864) at `positions` [S], or [3, S] of M-RoPE.
    `head_dim` is the width of the rotated vectors, of which the share `rope.share` takes part."""
    inverse = inverse_frequencies(rope, head_dim)
    if rope.sections is not None and positions.dim() == 2:
        turns = (positions.float()[_axes(rope)] * inverse[:, None]).T.contiguous()
    else:
        turns = torch.outer(positions.float(), inverse)
    turns = turns[:, None, :].to(device)
    factor = rotation_factor(rope.scaling)
    return Angles(
        cos=turns.cos().mul_(factor), sin=turns.sin().mul_(factor), interleaved=rope.interleaved
    )


def _axes(rope: Rope) -> torch.Tensor:
    """Return [rotated dims / 2]: which of a token's three positions each angle depends on."""
    assert rope.sections is not None
    lengths = torch.tensor(rope.sections)
    if not rope.sections_interleaved:
        return torch.arange(3).repeat_interleave(lengths)
    axes = torch.zeros(int(lengths.sum()), dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * rope.sections[axis] : 3] = axis
    return axes


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return [rotated dims / 2] float32, radians per position, stretched according to
    `rope.scaling`."""
    rotated = int(head_dim * rope.share)
    if rope.proportional:
        turning = int(rope.share * head_dim // 2)
        turning_part = 1.0 / rope.theta ** (
            torch.arange(0, 2 * turning, 2, dtype=torch.float32) / head_dim
        )
        return torch.cat([turning_part, torch.zeros(head_dim // 2 - turning)])
    plain = 1.0 / rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    if rope.scaling is None:
        return plain
    if rope.scaling.kind == "linear":
        return plain / rope.scaling.factor
    return (
        _llama3(plain, rope.scaling)
        if rope.scaling.kind == "llama3"
        else _yarn(plain, rope, rope.scaling, rotated)
    )


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Return the frequencies: short waves unchanged, long ones stretched, those between blended
    (Llama 3.1 model card)."""
    waves = 2 * math.pi / plain
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    blend = (scaling.original_max_positions / waves - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * plain / scaling.factor + blend * plain
    stretched = torch.where(waves > longest, plain / scaling.factor, plain)
    return torch.where((waves >= shortest) & (waves <= longest), between, stretched)


def _yarn(plain: torch.Tensor, rope: Rope, scaling: RopeScaling, rotated: int) -> torch.Tensor:
    """Return the frequencies: dims that rotate fast keep their angles, those that rotate slowly are
    stretched, with a ramp between (arXiv 2309.00071, eq. 23)."""

    def dim_of(turns: float) -> float:
        return (
            rotated
            * math.log(scaling.original_max_positions / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    first, last = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(rotated // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


def rotation_factor(scaling: RopeScaling | None) -> float:
    """Return YaRN's factor of cos and sin: its paper's formula, or a quotient of two (`mscale`) in
    DeepSeek's form."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _temperature(scaling.factor, scaling.mscale) / _temperature(
            scaling.factor, scaling.mscale_all_dim
        )
    return _temperature(scaling.factor, 1.0)


def _temperature(factor: float, weight: float) -> float:
    """Return YaRN's attention temperature (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class _Rotate(torch.autograd.Function):
    """Rotates, with the inverse rotation as its gradient."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, back=False)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, ctx.interleaved, back=True), None, None, None


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate x [S, heads, d] in float32. Dims beyond the rotated ones are unchanged."""
    rotated = 2 * angles.cos.shape[-1]
    if rotated == x.shape[-1]:
        return _Rotate.apply(x, angles.cos, angles.sin, angles.interleaved)
    turned = _Rotate.apply(x[..., :rotated], angles.cos, angles.sin, angles.interleaved)
    return torch.cat([turned, x[..., rotated:]], dim=-1)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, *, back: bool
) -> torch.Tensor:
    """Rotate x [S, heads, d] by the angles of cos and sin [S, 1, d / 2]; backwards if `back`."""
    if not interleaved and (exact.is_on() or cpu_kernels.supports(x, cos, sin)):
        turned = cpu_kernels.rotate(x.float(), cos.flatten(1), sin.flatten(1), back=back)
        return turned.to(x.dtype)
    if back:
        sin = -sin
    wide = x.float()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if interleaved:
        (first, second), (out_first, out_second) = (
            (wide[..., ::2], wide[..., 1::2]),
            (out[..., ::2], out[..., 1::2]),
        )
    else:
        (first, second), (out_first, out_second) = wide.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out.to(x.dtype)
