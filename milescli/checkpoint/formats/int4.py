"""INT4 by groups, symmetric: numbers of -8 to 7, eight to an int32 (the first in the lowest bits, 8
added), and one bfloat16 scale for each 32 or 128 of a row: `compressed-tensors` W4A16,
`pack-quantized`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from milescli.checkpoint.formats.base import Codec, Parts, block_maxima

SMALLEST, LARGEST = -8, 7
PER_ELEMENT = 8
GROUP = 32
"""Group size of Kimi K2 Thinking's and K2.5's releases."""


def _fit(weight: Tensor, _: Tensor | None, *, group: int) -> tuple[Tensor, Parts]:
    """Return the numbers and scales; the largest magnitude of a group becomes 7, as in public
    quantisation-aware training."""
    grouped = weight.float().unflatten(-1, (-1, group or weight.shape[-1]))
    scale = _storable(block_maxima(weight, (1, group)) / LARGEST)
    numbers = (grouped / scale[..., None].float()).round_().clamp_(SMALLEST, LARGEST)
    return numbers.flatten(-2), {"scale": scale}


def _storable(scale: Tensor) -> Tensor:
    stored = scale.to(torch.bfloat16)
    return torch.where(stored > 0, stored, torch.ones_like(stored))


def pack(numbers: Tensor) -> Tensor:
    """Pack eight integers per word: [..., columns] -> [..., columns / 8 rounded up] int32."""
    missing = -numbers.shape[-1] % PER_ELEMENT
    unsigned = torch.nn.functional.pad(numbers.to(torch.int64) - SMALLEST, (0, missing)).unflatten(
        -1, (-1, PER_ELEMENT)
    )
    shifts = torch.arange(0, 4 * PER_ELEMENT, 4, device=numbers.device)
    word = (unsigned << shifts).sum(dim=-1)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Invert `pack` to float32, including all eight numbers of the last word."""
    shifts = torch.arange(0, 4 * PER_ELEMENT, 4, dtype=torch.int32, device=words.device)
    return (((words[..., None] >> shifts) & 0xF) + SMALLEST).flatten(-2).float()


def codec(group: int = GROUP) -> Codec:
    """Return the INT4 codec with one scale per `group` elements of a row (0: the whole row)."""
    return Codec(
        name="int4",
        block=(1, group),
        per_element=PER_ELEMENT,
        values_dtypes=(torch.int32,),
        scale_dtypes=(torch.bfloat16, torch.float16, torch.float32),
        fit=partial(_fit, group=group),
        pack=pack,
        unpack=unpack,
        scales=lambda parts: parts["scale"].float(),
        half_step=lambda magnitude: torch.full_like(magnitude, 0.5),
    )
