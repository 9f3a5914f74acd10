"""MXFP8: float8_e4m3fn numbers, and one E8M0 scale for each 32 of a row (OCP Microscaling Formats
v1.0, section 5.2), as SGLang stores it: `weight_scale_inv` in uint8.

Scales are rounded up, so that no number lies beyond the largest of e4m3. The specification's
example (section 6.3) rounds down, and cuts off the largest numbers of most blocks."""

from __future__ import annotations

from collections.abc import Mapping

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
from milescli.checkpoint.formats.fp8_block import LARGEST, half_step_e4m3, to_e4m3

BLOCK = (1, 32)


def _quantise(weight: Tensor, _: Tensor | None) -> Parts:
    maxima = block_maxima(weight, BLOCK)
    scale = torch.where(maxima > 0, smallest_power(maxima / LARGEST), torch.ones_like(maxima))
    return {
        "values": to_e4m3(weight.float() / expand(scale, BLOCK, like=weight, offset=(0, 0))),
        "scale": to_e8m0(scale),
    }


def _scales(parts: Mapping[str, Tensor]) -> Tensor:
    return from_e8m0(parts["scale"])


CODEC = Codec(
    name="mxfp8",
    block=BLOCK,
    per_element=1,
    values_dtypes=(torch.float8_e4m3fn,),
    scale_dtypes=(torch.uint8, torch.float8_e8m0fnu),
    quantise=_quantise,
    unpack=torch.Tensor.float,
    scales=_scales,
    half_step=half_step_e4m3,
)
