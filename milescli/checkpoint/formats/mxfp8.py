"""MXFP8: float8_e4m3fn numbers, and one E8M0 scale for each 32 of a row (OCP Microscaling Formats
v1.0, section 5.2), as SGLang stores it: `weight_scale_inv` in uint8.

The scale is the smallest power of two with which the largest number loses at most half a step. The
specification's example (section 6.3) rounds the scale down, which truncates the largest numbers of
most blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from milescli.checkpoint.formats import fp8_block
from milescli.checkpoint.formats.base import Codec, Parts, from_e8m0, to_e8m0

BLOCK = (1, 32)


def _fit(weight: Tensor, shared: Tensor | None) -> tuple[Tensor, Parts]:
    numbers, parts = fp8_block.fit(weight, shared, block=BLOCK, powers=True)
    return numbers, {"scale": to_e8m0(parts["scale"])}


CODEC = Codec(
    name="mxfp8",
    block=BLOCK,
    per_element=1,
    values_dtypes=(torch.float8_e4m3fn,),
    scale_dtypes=(torch.uint8, torch.float8_e8m0fnu),
    fit=_fit,
    pack=fp8_block.to_e4m3,
    unpack=torch.Tensor.float,
    scales=lambda parts: from_e8m0(parts["scale"]),
    half_step=fp8_block.half_step_e4m3,
)
