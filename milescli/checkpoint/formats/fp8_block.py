"""FP8 by blocks: float8_e4m3fn numbers and one scale for each 128 x 128 block (DeepSeek-V3
technical report, section 3.3), in float32 or, if `scale_fmt` is ue8m0, a power of two. Blocks at
the edges are partial."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from milescli.checkpoint.formats.base import (
    Codec,
    Parts,
    block_maxima,
    expand,
    from_e8m0,
    smallest_power,
)

LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
ROUNDS_TO_LARGEST = 464.0
"""Numbers up to this lose at most half a step when rounded to 448. The scale is the smallest power
of two that brings a block's largest number within this. The rounded block then gets the same scale,
since its largest number is between 240 and 448; measured against 448, a block that rounds to 224
would get half the scale."""
BLOCK = (128, 128)
_SMALLEST_EXPONENT = -6
_MANTISSA_BITS = 3
_EXPONENT_BITS = 0x7F800000
"""Exponent bits of a float32: alone they give the power of two at or below it."""


def to_e4m3(scaled: Tensor) -> Tensor:
    """Round to nearest with ties to even, saturating at the largest number."""
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def half_step_e4m3(magnitude: Tensor) -> Tensor:
    """Return half the distance between neighbouring e4m3 numbers at `magnitude` (float32)."""
    power = (magnitude.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return (power * 2.0 ** -(_MANTISSA_BITS + 1)).clamp(
        min=2.0 ** (_SMALLEST_EXPONENT - _MANTISSA_BITS - 1)
    )


def fit(
    weight: Tensor, _: Tensor | None, *, block: tuple[int, int], powers: bool
) -> tuple[Tensor, Parts]:
    """Return the e4m3 numbers, as float32, and the float32 scale of each block."""
    scale = block_maxima(weight, block) / (ROUNDS_TO_LARGEST if powers else LARGEST)
    # a block of zeros has no largest number; and below the smallest normal float32 a scale would
    # lose its digits
    scale = torch.where(
        scale > 0, scale.clamp(min=torch.finfo(torch.float32).tiny), torch.ones_like(scale)
    )
    if powers:
        scale = smallest_power(scale)
    numbers = to_e4m3(weight.float() / expand(scale, block, like=weight, offset=(0, 0)))
    return numbers.float(), {"scale": scale}


def _scales(parts: Mapping[str, Tensor]) -> Tensor:
    scale = parts["scale"]
    return from_e8m0(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.float()


def codec(block: tuple[int, int] = BLOCK, *, powers: bool = False) -> Codec:
    """Return the FP8 codec with one scale per block of `block` elements (0: whole rows or columns);
    with `powers`, scales are powers of two."""
    return Codec(
        name="fp8",
        block=block,
        per_element=1,
        values_dtypes=(torch.float8_e4m3fn,),
        scale_dtypes=(torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8),
        fit=partial(fit, block=block, powers=powers),
        pack=to_e4m3,
        unpack=torch.Tensor.float,
        scales=_scales,
        half_step=half_step_e4m3,
    )
