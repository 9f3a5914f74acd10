"""INT4 by groups, symmetric: numbers of -8 to 7, eight to an int32 (the first in the lowest bits, 8
added), and one bfloat16 scale for each 32 or 128 of a row: `compressed-tensors` W4A16,
`pack-quantized`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from milescli.checkpoint.formats.base import Codec, Parts, block_maxima

SMALLEST, LARGEST = -8, 7
PER_ELEMENT = 8
GROUP = 32
"""Group size of Kimi K2 Thinking's and K2.5's releases."""


def _quantise(weight: Tensor, _: Tensor | None, *, group: int) -> Parts:
    """Of three scales the one with the smallest squared error, group by group: the largest
    magnitude becomes 7; where it is negative, -8; and the first one moved to where the numbers fit
    best, by at most a step of bfloat16. Weights that come from such a grid, as those of releases
    trained in INT4 do, so return to it, although their plain form was rounded."""
    grouped = weight.float().unflatten(-1, (-1, group))
    by_largest = _storable(block_maxima(weight, (1, group)) / LARGEST)
    scale, numbers = by_largest, _round(grouped, by_largest)
    error = _squared(grouped, numbers, scale)
    for other in (
        _storable(-grouped.amin(dim=-1) / -SMALLEST),
        _fitted(grouped, numbers, by_largest),
    ):
        tried = _round(grouped, other)
        # it is no choice where it does not hold the largest numbers
        holds = grouped.amax(dim=-1) <= (LARGEST + 0.5) * other.float()
        better = holds & (_squared(grouped, tried, other) < error)
        scale = torch.where(better, other, scale)
        numbers = torch.where(better[..., None], tried, numbers)
        error = torch.where(better, _squared(grouped, tried, other), error)
    return {"values": pack(numbers.flatten(-2)), "scale": scale}


def _squared(grouped: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    return ((numbers * scale[..., None].float() - grouped) ** 2).sum(dim=-1)


def _fitted(grouped: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """The scale of least squares, where it is within a step of bfloat16."""
    squares = (numbers**2).sum(dim=-1)
    fitted = _storable((numbers * grouped).sum(dim=-1) / squares.clamp(min=1))
    return torch.where(
        (fitted.float() - scale.float()).abs() <= 2.0**-7 * scale.float(), fitted, scale
    )


def _storable(scale: Tensor) -> Tensor:
    stored = scale.to(torch.bfloat16)
    return torch.where(stored > 0, stored, torch.ones_like(stored))


def _round(grouped: Tensor, scale: Tensor) -> Tensor:
    return (grouped / scale[..., None].float()).round().clamp(SMALLEST, LARGEST)


def pack(numbers: Tensor) -> Tensor:
    """Pack eight integers per word: [..., columns] -> [..., columns / 8 rounded up] int32."""
    missing = -numbers.shape[-1] % PER_ELEMENT
    unsigned = torch.nn.functional.pad(numbers.to(torch.int64) - SMALLEST, (0, missing)).unflatten(
        -1, (-1, PER_ELEMENT)
    )
    shifts = torch.arange(0, 4 * PER_ELEMENT, 4)
    word = (unsigned << shifts).sum(dim=-1)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Invert `pack` to float32, including all eight numbers of the last word."""
    shifts = torch.arange(0, 4 * PER_ELEMENT, 4, dtype=torch.int32)
    return (((words[..., None] >> shifts) & 0xF) + SMALLEST).flatten(-2).float()


def _scales(parts: Mapping[str, Tensor]) -> Tensor:
    return parts["scale"].float()


def codec(group: int = GROUP) -> Codec:
    """Return the INT4 codec with one scale per `group` elements of a row (0: the whole row)."""
    return Codec(
        name="int4",
        block=(1, group),
        per_element=PER_ELEMENT,
        values_dtypes=(torch.int32,),
        scale_dtypes=(torch.bfloat16, torch.float16, torch.float32),
        quantise=partial(_quantise, group=group),
        unpack=unpack,
        scales=_scales,
        half_step=lambda magnitude: torch.full_like(magnitude, 0.5),
    )
