"""Defines number formats: a codec (tensors -> parts and back, with its rounding bound) and a scheme
(how folders name the parts).

Weights are [..., rows, columns]; a block of `rows x columns` numbers along the last two dims shares
one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Parts = dict[str, Tensor]
"""role -> tensor: `values`, `scale`, and if the format has them `global_scale` and `shape`"""

SLACK = 1 + 2.0**-17
"""Bounds assume exact arithmetic. float32 divides and multiplies by up to 2 ** 5 half steps, with
an error of 2 ** -24 each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """Defines one number format. Functions are pure and work on the last two dims."""

    name: str
    block: tuple[int, int]
    """Rows and columns that share a scale; 0: all rows or columns."""
    per_element: int
    """Numbers in one element of the stored tensor, along the last dim."""
    values_dtypes: tuple[torch.dtype, ...]
    """Dtypes in which folders store the numbers; the first is written."""
    scale_dtypes: tuple[torch.dtype, ...]
    fit: Callable[[Tensor, Tensor | None], tuple[Tensor, Parts]]
    """([..., rows, columns], largest magnitude of all tensors that share a global scale, None: of
    this one) -> (float32 numbers that the format can represent, the scales that multiply them)"""
    pack: Callable[[Tensor], Tensor]
    """Numbers that the format can represent -> stored numbers."""
    unpack: Callable[[Tensor], Tensor]
    """Stored numbers -> float32, before scaling."""
    scales: Callable[[Mapping[str, Tensor]], Tensor]
    """Stored scales (and global scale) -> float32 factors."""
    half_step: Callable[[Tensor], Tensor]
    """|numbers before rounding, in units of the scale| -> the largest error of rounding, in units
    of the scale."""
    needs_largest: bool = False
    """True if it has a global scale, computed from the largest magnitude of the whole tensor."""

    def quantise(self, weight: Tensor, shared: Tensor | None = None) -> Parts:
        """Return the parts of a weight [..., rows, columns]. `shared`: largest magnitude of all
        tensors that share a global scale; None: of this one."""
        numbers, scales = self.fit(weight, shared)
        return {"values": self.pack(numbers), **scales}

    def rounded(self, weight: Tensor, shared: Tensor | None = None) -> Tensor:
        """Return `dequantise(quantise(weight))`, bit for bit, float32, without packing."""
        numbers, scales = self.fit(weight, shared)
        return numbers * expand(self.scales(scales), self.block, like=numbers, offset=(0, 0))

    def dequantise(
        self, parts: Mapping[str, Tensor], *, offset: tuple[int, int] = (0, 0)
    ) -> Tensor:
        """Return the float32 weight. `parts` may be a region: `offset` is the row and column within
        its first block at which it begins."""
        values = self.unpack(parts["values"])
        return values * expand(self.scales(parts), self.block, like=values, offset=offset)

    def bound(self, weight: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """Return [as weight] the largest |difference| from `dequantise(parts)` that is possible if
        each number was rounded to the nearest."""
        scale = expand(self.scales(parts), self.block, like=weight, offset=(0, 0)).abs()
        return self.half_step(weight.float().abs() / scale) * scale * SLACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Combines a codec with the suffixes that folders append to a module's name for each part."""

    codec: Codec
    suffixes: Mapping[str, str]
    """role -> suffix of the name on disk"""
    plain_suffix: str = ".weight"
    """Suffix of the plain tensor."""
    transposed: bool = False
    """True if the plain tensor has the last two dims swapped (gpt-oss)."""
    grouped: bool = False
    """True if the numbers of each block have a dim of their own (gpt-oss)."""

    def names(self, plain: str) -> dict[str, str]:
        """Map a plain name to role -> name on disk."""
        stem = plain.removesuffix(self.plain_suffix) if self.plain_suffix else plain
        return {role: stem + suffix for role, suffix in self.suffixes.items()}

    def plain_name(self, values_name: str) -> str | None:
        """Return the plain name for the name of a part `values`; None for any other name."""
        suffix = self.suffixes["values"]
        return (
            values_name.removesuffix(suffix) + self.plain_suffix
            if values_name.endswith(suffix)
            else None
        )


def blocks(length: int, size: int) -> int:
    """Return the number of blocks of `size` (0: one block) along a dim; the last may be partial."""
    return -(-length // size) if size else 1


def stored_shapes(codec: Codec, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return role -> shape of the parts of a plain tensor [..., rows, columns]."""
    *lead, rows, columns = shape
    return {
        "values": (*lead, rows, blocks(columns, codec.per_element)),
        "scale": (*lead, blocks(rows, codec.block[0]), blocks(columns, codec.block[1])),
    }


def expand(
    scale: Tensor, block: tuple[int, int], *, like: Tensor, offset: tuple[int, int]
) -> Tensor:
    """Expand scales [..., blocks, blocks] to a factor for each element of `like`, which begins
    `offset` within the first block."""
    for dim, size, begin in ((-2, block[0], offset[0]), (-1, block[1], offset[1])):
        if size > 1:
            scale = scale.repeat_interleave(size, dim=dim).narrow(dim, begin, like.shape[dim])
    return scale


def block_maxima(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each block, [..., rows, columns] -> [..., blocks, blocks]
    float32."""
    maxima = weight.float().abs()
    for dim, size in ((-2, block[0]), (-1, block[1])):
        length = maxima.shape[dim]
        size = size or length
        missing = blocks(length, size) * size - length
        if missing:
            maxima = torch.cat(
                [maxima, maxima.new_zeros(_with(maxima.shape, dim, missing))], dim=dim
            )
        maxima = maxima.unflatten(dim, (-1, size)).amax(dim=dim)
    return maxima


def _with(shape: torch.Size, dim: int, length: int) -> list[int]:
    changed = list(shape)
    changed[dim] = length
    return changed


def row_chunks(
    codec: Codec, rows: int, columns: int, *, numbers: int = 2**19
) -> list[tuple[int, int]]:
    """Return (first row, end) of chunks of about `numbers` elements that end at block boundaries. A
    weight that is processed in chunks needs little memory and reuses it: fresh pages cost more than
    the arithmetic."""
    block = codec.block[0] or rows
    length = max(numbers // max(columns, 1) // block, 1) * block
    return [(first, min(first + length, rows)) for first in range(0, rows, length)]


def quantise_by_rows(codec: Codec, weight: Tensor, shared: Tensor | None = None) -> Parts:
    """Quantise [rows, columns] like `codec.quantise`, chunk by chunk. `shared` is the largest
    magnitude under one global scale."""
    if codec.needs_largest and shared is None:
        shared = weight.abs().max().float()
    pieces = [
        codec.quantise(weight[first:end], shared) for first, end in row_chunks(codec, *weight.shape)
    ]
    parts = {role: torch.cat([piece[role] for piece in pieces]) for role in ("values", "scale")}
    return parts | {role: tensor for role, tensor in pieces[0].items() if role not in parts}


def rounded_by_rows(codec: Codec, weight: Tensor, shared: Tensor | None = None) -> Tensor:
    """Return [rows, columns] as `codec.rounded` does, in the weight's dtype, chunk by chunk."""
    if codec.needs_largest and shared is None:
        shared = weight.abs().max().float()
    out = torch.empty_like(weight)
    for first, end in row_chunks(codec, *weight.shape):
        out[first:end] = codec.rounded(weight[first:end], shared)
    return out


def dequantise_by_rows(
    codec: Codec,
    parts: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    columns: tuple[int, int],
    offset: tuple[int, int] = (0, 0),
) -> Tensor:
    """Return `codec.dequantise(parts)` rounded to `dtype`, computed chunk by chunk. Returns columns
    [start:end], counted from the first stored one."""
    values, scale = parts["values"], parts["scale"]
    out = torch.empty((*values.shape[:-1], columns[1] - columns[0]), dtype=dtype)
    if values.dim() > 2:
        for number in range(len(values)):
            own = {**parts, "values": values[number], "scale": scale[number]}
            out[number] = dequantise_by_rows(
                codec, own, dtype=dtype, columns=columns, offset=offset
            )
        return out
    size = codec.block[0]
    # after a first piece that ends where its block does, pieces begin with blocks
    begin = min(size - offset[0], len(values)) if size and offset[0] else 0
    chunks = [
        (begin + first, begin + end)
        for first, end in row_chunks(codec, len(values) - begin, out.shape[1])
    ]
    for first, end in ([(0, begin)] if begin else []) + (chunks if len(values) > begin else []):
        at = offset[0] + first
        rows = scale[at // size : -(-(offset[0] + end) // size)] if size else scale
        own = {**parts, "values": values[first:end], "scale": rows}
        whole = codec.dequantise(own, offset=(at % size if size else 0, offset[1]))
        out[first:end] = whole[:, columns[0] : columns[1]]
    return out


BIAS = 127
_SMALLEST_NORMAL = -126


def smallest_power(value: Tensor) -> Tensor:
    """Return the smallest power of two that is at least `value` (float32, positive), within the
    normal numbers of float32."""
    mantissa, exponent = torch.frexp(value)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(value), exponent.clamp(_SMALLEST_NORMAL, BIAS))


def to_e8m0(power: Tensor) -> Tensor:
    """Encode powers of two, float32 -> uint8."""
    return (torch.frexp(power)[1] - 1 + BIAS).to(torch.uint8)


def from_e8m0(stored: Tensor) -> Tensor:
    """Decode powers of two, uint8 or float8_e8m0fnu -> float32."""
    exponent = stored.view(torch.uint8).to(torch.int32) - BIAS
    power = torch.ldexp(torch.ones(stored.shape, device=stored.device), exponent)
    return torch.where(exponent == 255 - BIAS, torch.full_like(power, torch.nan), power)
