"""FP4 (E2M1) with two numbers to a byte, the first in the low half, and the three ways in which
releases scale it:

- NVFP4 (ModelOpt): 16 numbers of a row share an e4m3 scale (`weight_scale`), the tensor a float32
  one (`weight_scale_2`);
- MXFP4 (gpt-oss): 32 share an E8M0 scale; experts stacked as `_blocks` [experts, rows, groups, 16]
  and `_scales`;
- MXFP4 (DeepSeek-V4's experts): the same numbers as int8 [rows, columns / 2], with `scale` in
  float8_e8m0fnu.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from milescli.checkpoint.formats.base import (
    Codec,
    Parts,
    block_maxima,
    expand,
    from_e8m0,
    smallest_power,
    to_e8m0,
)
from milescli.checkpoint.formats.fp8_block import LARGEST as LARGEST_E4M3
from milescli.checkpoint.formats.fp8_block import ROUNDS_TO_LARGEST

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values by code: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats v1.0,
section 5.3.3)."""
LARGEST = 6.0
NV_BLOCK, MX_BLOCK = (1, 16), (1, 32)


def to_numbers(scaled: Tensor) -> Tensor:
    """Round float32 to the nearest E2M1 number, ties to the even code, saturating at 6."""
    size = scaled.abs().clamp_(max=LARGEST)
    # steps of 0.5 below 2, of 1 below 4, of 2 beyond; `round` takes ties to even, as do the codes
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step).round_() * step, scaled)


def to_e2m1(scaled: Tensor) -> Tensor:
    """Encode float32 as codes, uint8, rounding like `to_numbers`."""
    numbers = to_numbers(scaled)
    size = numbers.abs()
    code = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4))
    return code.to(torch.uint8) | (torch.signbit(numbers).to(torch.uint8) << 3)


def pack(numbers: Tensor) -> Tensor:
    """Pack two numbers per byte: [..., columns] -> [..., columns / 2] uint8."""
    codes = to_e2m1(numbers)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(stored: Tensor) -> Tensor:
    """Unpack [..., columns / 2] uint8 or int8 -> [..., columns] float32, without scaling."""
    both = stored.view(torch.uint8)
    table = torch.tensor(VALUES, device=stored.device)
    return torch.stack([table[(both & 0xF).long()], table[(both >> 4).long()]], dim=-1).flatten(-2)


def half_step_e2m1(magnitude: Tensor) -> Tensor:
    """Return half the distance between neighbouring numbers at `magnitude`. Beyond 6, return the
    error of saturation, which is at most 1.5 and occurs if a scale among e4m3's lowest numbers was
    rounded down."""
    beyond = (magnitude - LARGEST).clamp(1.0, 1.5)
    return torch.where(magnitude < 2, 0.25, torch.where(magnitude < 4, 0.5, beyond))


def _fit_nv(weight: Tensor, shared: Tensor | None) -> tuple[Tensor, Parts]:
    """Return the numbers and scales. The global scale is the smallest power of two with which the
    largest block's scale rounds to e4m3. ModelOpt divides the largest magnitude by 6 * 448 instead;
    a power of two loses half of e4m3's lowest power of two, but makes the format a fixed point: the
    rounded weights get the same global scale, whether it was stored or not, and bfloat16 represents
    each of them."""
    maxima = block_maxima(weight, NV_BLOCK)
    largest = (maxima.max() if shared is None else shared).float()
    whole = smallest_power(largest / (LARGEST * ROUNDS_TO_LARGEST))
    whole = torch.where(largest > 0, whole, torch.ones_like(whole))
    scale = (maxima / (LARGEST * whole)).clamp(max=LARGEST_E4M3).to(torch.float8_e4m3fn)
    # no scale is 0; and the smallest would cut off numbers that the next one, its double, holds
    code = scale.view(torch.uint8)
    short = (code == 1) & (maxima > (LARGEST + 1) * scale.float() * whole)
    scale = torch.where(short | (code == 0), code + 1, code).view(torch.float8_e4m3fn)
    factors = expand(scale.float() * whole, NV_BLOCK, like=weight, offset=(0, 0))
    return to_numbers(weight.float() / factors), {
        "scale": scale,
        "global_scale": whole.reshape(()),
    }


def _fit_mx(weight: Tensor, _: Tensor | None) -> tuple[Tensor, Parts]:
    """Return the numbers and scales. A scale is the smallest power of two with which the largest
    number loses at most half a step, which makes the format a fixed point."""
    maxima = block_maxima(weight, MX_BLOCK)
    scale = smallest_power(maxima / (LARGEST + 1))
    scale = torch.where(maxima > 0, scale, torch.ones_like(maxima))
    numbers = to_numbers(weight.float() / expand(scale, MX_BLOCK, like=weight, offset=(0, 0)))
    return numbers, {"scale": to_e8m0(scale)}


NVFP4 = Codec(
    name="nvfp4",
    block=NV_BLOCK,
    per_element=2,
    values_dtypes=(torch.uint8,),
    scale_dtypes=(torch.float8_e4m3fn,),
    fit=_fit_nv,
    pack=pack,
    unpack=unpack,
    scales=lambda parts: parts["scale"].float() * parts["global_scale"].float(),
    half_step=half_step_e2m1,
    needs_largest=True,
)
NVFP4_DIVIDED = replace(
    NVFP4, scales=lambda parts: parts["scale"].float() / parts["global_scale"].float()
)
"""The form of compressed-tensors, whose global scale is the inverse. Only for reading."""
MXFP4 = Codec(
    name="mxfp4",
    block=MX_BLOCK,
    per_element=2,
    values_dtypes=(torch.uint8, torch.int8),
    scale_dtypes=(torch.uint8, torch.float8_e8m0fnu),
    fit=_fit_mx,
    pack=pack,
    unpack=unpack,
    scales=lambda parts: from_e8m0(parts["scale"]),
    half_step=half_step_e2m1,
)
