"""Encodes changes of bytes of which the receiver has an older version: at small learning rates, one
weight in a hundred changes in bfloat16, and nine of ten of these by one unit in the last place.
Pure.

A change is coded as the gap to it, one byte (255: continued in the next byte), and its step, one
byte: by how many numbers of bfloat16 it moved, in order of value. A larger step is coded as -128,
and the number itself follows after all steps. Words of other dtypes are coded as if they were
bfloat16: nothing is lost.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int16]
_FAR = -128
"""Step of a number that follows in full."""
_ON = 255
"""Gap that continues in the next byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Describes encoded changes; their bytes are separate."""

    num_gaps: int
    """Bytes of the gaps."""
    num_steps: int
    """Bytes of the steps: one for each change."""
    num_far: int
    """Numbers in full, of two bytes each."""
    checksum: int
    """CRC-32 of the resulting bytes."""


def encode(old: Words, new: Words) -> tuple[Delta, NDArray[np.uint8]]:
    """Return the changes from [words] `old` to `new`, and their bytes."""
    changed = np.flatnonzero(old != new)
    gaps = np.diff(changed, prepend=-1) - 1
    whole, rest = np.divmod(gaps, _ON)
    coded = np.full(len(gaps) + int(whole.sum()), _ON, np.uint8)
    coded[np.arange(len(gaps)) + np.cumsum(whole)] = rest
    moved = _in_order(new[changed]) - _in_order(old[changed])
    is_far = np.abs(moved) > 127
    steps = np.where(is_far, _FAR, moved).astype(np.int8)
    far = new[changed][is_far]
    raw = np.concatenate([coded, steps.view(np.uint8), far.view(np.uint8)])
    delta = Delta(
        num_gaps=len(coded),
        num_steps=len(steps),
        num_far=len(far),
        checksum=checksum(new),
    )
    return delta, raw


def apply(delta: Delta, raw: NDArray[np.uint8], words: Words) -> None:
    """Change [words] in place. Raises ValueError if they are not the old words."""
    coded = raw[: delta.num_gaps].astype(np.int64)
    ends = coded != _ON
    changed = np.cumsum(coded + ends)[ends] - 1
    behind = delta.num_gaps + delta.num_steps
    steps = raw[delta.num_gaps : behind].view(np.int8).astype(np.int32)
    far = np.frombuffer(raw[behind : behind + 2 * delta.num_far].tobytes(), np.int16)
    is_far = steps == _FAR
    moved = _in_order(words[changed]) + np.where(is_far, 0, steps)
    result = _from_order(moved)
    result[is_far] = far
    words[changed] = result
    if checksum(words) != delta.checksum:
        raise ValueError("the changes were made for other weights")


def checksum(words: Words) -> int:
    """Return the CRC-32 of the bytes."""
    return zlib.crc32(words.view(np.uint8).data)


def _in_order(words: Words) -> NDArray[np.int32]:
    """Map bit patterns to integers in the order of the numbers: those of negative numbers run
    backwards."""
    wide = words.astype(np.int32)
    return np.where(wide < 0, -0x8000 - wide - 1, wide)


def _from_order(numbers: NDArray[np.int32]) -> Words:
    return np.where(numbers < 0, -0x8000 - numbers - 1, numbers).astype(np.int16)
