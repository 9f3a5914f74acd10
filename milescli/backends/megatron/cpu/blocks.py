"""Rows of a matrix in blocks that stay in a core's cache while several operations go over them.
Used by the layers of this folder."""

from __future__ import annotations

_BLOCK_VALUES = 131_072
"""512 KiB of float32: half a block is one of two threads' part, and a handful of those fit in a
level-2 cache. Fewer are not worth the calls."""


def row_blocks(num_rows: int, width: int) -> list[slice]:
    """All rows in order; the same cut for the same shape, so that sums come out bit-equal."""
    size = max(_BLOCK_VALUES // max(width, 1), 1)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
