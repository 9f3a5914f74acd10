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

from collections.abc import Mapping
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

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""By code: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats v1.0, section
5.3.3)."""
LARGEST = 6.0
NV_BLOCK, MX_BLOCK = (1, 16), (1, 32)
_LARGEST_E4M3 = 448.0


def to_e2m1(scaled: Tensor) -> Tensor:
    """Encode float32 as codes, uint8, rounding to nearest with ties to the even code and saturating
    at 6."""
    size = scaled.abs().clamp(max=LARGEST)
    # steps of 0.5 below 2, of 1 below 4, of 2 beyond; `round` takes ties to even, and so do the
    # codes
    code = torch.where(
        size < 2,
        (2 * size).round(),
        torch.where(size < 4, size.round() + 2, (size / 2).round() + 4),
    )
    return code.to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """Pack two codes per byte: [..., columns] -> [..., columns / 2] uint8."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(stored: Tensor) -> Tensor:
    """Unpack [..., columns / 2] uint8 or int8 -> [..., columns] float32, without scaling."""
    both = stored.view(torch.uint8)
    table = torch.tensor(VALUES, device=stored.device)
    return torch.stack([table[(both & 0xF).long()], table[(both >> 4).long()]], dim=-1).flatten(-2)


def half_step_e2m1(magnitude: Tensor) -> Tensor:
    """Return half the distance between neighbouring numbers at `magnitude`."""
    quarter = torch.full_like(magnitude, 0.25)
    return torch.where(magnitude < 2, quarter, torch.where(magnitude < 4, 2 * quarter, 4 * quarter))


def _quantise_nv(weight: Tensor, shared: Tensor | None) -> Parts:
    """The global scale lets the largest block's scale be e4m3's largest."""
    maxima = block_maxima(weight, NV_BLOCK)
    largest = (maxima.max() if shared is None else shared).float()
    whole = torch.where(largest > 0, largest / (LARGEST * _LARGEST_E4M3), torch.ones_like(largest))
    scale = (maxima / (LARGEST * whole)).clamp(max=_LARGEST_E4M3).to(torch.float8_e4m3fn)
    # a scale that was rounded down so far that 6 would cut off more than half a step: the next one
    # above
    short = maxima > (LARGEST + 1) * scale.float() * whole
    scale = torch.where(
        short | (scale.float() == 0), scale.view(torch.uint8) + 1, scale.view(torch.uint8)
    ).view(torch.float8_e4m3fn)
    factors = expand(scale.float() * whole, NV_BLOCK, like=weight, offset=(0, 0))
    return {
        "values": pack(to_e2m1(weight.float() / factors)),
        "scale": scale,
        "global_scale": whole.reshape(()),
    }


def _quantise_mx(weight: Tensor, _: Tensor | None) -> Parts:
    """Scales are rounded up, so that no number lies beyond 6."""
    maxima = block_maxima(weight, MX_BLOCK)
    scale = torch.where(maxima > 0, smallest_power(maxima / LARGEST), torch.ones_like(maxima))
    return {
        "values": pack(
            to_e2m1(weight.float() / expand(scale, MX_BLOCK, like=weight, offset=(0, 0)))
        ),
        "scale": to_e8m0(scale),
    }


def _nv_scales(parts: Mapping[str, Tensor]) -> Tensor:
    return parts["scale"].float() * parts["global_scale"].float()


def _nv_scales_divided(parts: Mapping[str, Tensor]) -> Tensor:
    return parts["scale"].float() / parts["global_scale"].float()


def _mx_scales(parts: Mapping[str, Tensor]) -> Tensor:
    return from_e8m0(parts["scale"])


NVFP4 = Codec(
    name="nvfp4",
    block=NV_BLOCK,
    per_element=2,
    values_dtypes=(torch.uint8,),
    scale_dtypes=(torch.float8_e4m3fn,),
    quantise=_quantise_nv,
    unpack=unpack,
    scales=_nv_scales,
    half_step=half_step_e2m1,
    needs_largest=True,
)
NVFP4_DIVIDED = replace(NVFP4, scales=_nv_scales_divided)
"""As compressed-tensors has it, whose global scale is the other's inverse. For reading."""
MXFP4 = Codec(
    name="mxfp4",
    block=MX_BLOCK,
    per_element=2,
    values_dtypes=(torch.uint8, torch.int8),
    scale_dtypes=(torch.uint8, torch.float8_e8m0fnu),
    quantise=_quantise_mx,
    unpack=unpack,
    scales=_mx_scales,
    half_step=half_step_e2m1,
)
