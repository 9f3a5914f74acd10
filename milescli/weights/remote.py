"""Reads parts of weights from the memory of other processes when a loader needs them. Knows no
vendor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Protocol

import torch

RUN_COST_BYTES = 2**14
"""Cost of a separate run, in bytes that could be read meanwhile: if fewer lie between two runs,
both are read as one. A guess for RDMA, where it is untested; over TCP a run took 65 to 126
microseconds, in which a long one reads 90 to 170 KB."""


class Reader(Protocol):
    """Reads memory of another process."""

    def memory_for(self, size_bytes: int) -> torch.Tensor:
        """Return memory ([bytes] uint8) into which the reader can read."""

    def forget(self, memory: torch.Tensor) -> None:
        """Release memory from `memory_for`: nothing more is read into it."""

    def read(self, memory: str, runs: Sequence[tuple[int, int, int]], into: torch.Tensor) -> None:
        """Read each (first byte in `memory`, first byte in `into`, bytes) of `runs`. `into`:
        [bytes] uint8. Raises OSError."""


class ReceiveBuffer:
    """Lends memory for the data of one order, the same memory for each order, as allocating it is
    slow."""

    def __init__(self, reader: Reader) -> None:
        """Use `reader` to allocate the memory and to read into it."""
        self.reader = reader
        self._lent: list[torch.Tensor] = []
        """First the memory of each order; then of numbers for which it was too small."""
        self._used = 0

    def begin(self, size_bytes: int) -> None:
        """Free the memory of the last order for one of `size_bytes`."""
        keeps = bool(self._lent) and len(self._lent[0]) >= size_bytes
        for memory in self._lent[keeps:]:
            self.reader.forget(memory)
        self._lent = self._lent[:1] if keeps else [self.reader.memory_for(size_bytes)]
        self._used = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return [size_bytes] uint8, at a multiple of 16 bytes, until the next order begins."""
        start = -(-self._used // 16) * 16
        if start + size_bytes > len(self._lent[0]):  # a loader that reads some numbers twice
            self._lent.append(self.reader.memory_for(size_bytes))
            return self._lent[-1]
        self._used = start + size_bytes
        return self._lent[0][start : self._used]


class RemoteMemory:
    """Names memory of another process."""

    def __init__(self, memory: str, buffer: ReceiveBuffer) -> None:
        """Name `memory` as the buffer's reader knows it."""
        self._memory, self._buffer = memory, buffer

    def box(self, first: int, *, dtype: torch.dtype, shape: Sequence[int]) -> RemoteBox:
        """Return the contiguous numbers ([*shape]) from byte `first` on."""
        return RemoteBox(self._memory, first, dtype=dtype, shape=shape, buffer=self._buffer)


class RemoteBox:
    """Stands for the numbers of a box in another process: indexing reads only the indexed ones."""

    def __init__(
        self,
        memory: str,
        first: int,
        *,
        dtype: torch.dtype,
        shape: Sequence[int],
        buffer: ReceiveBuffer,
    ) -> None:
        self._memory, self._first = memory, first
        self._dtype, self._shape = dtype, tuple(shape)
        self._buffer = buffer

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Return the numbers of a slice of each dim, in memory of this process. Raises OSError."""
        bounds = [each.indices(size)[:2] for each, size in zip(index, self._shape, strict=True)]
        starts, length = runs(self._shape, bounds)
        size = self._dtype.itemsize
        row = prod(self._shape[1:])
        first, end = starts[0] // row * row, -(-(starts[-1] + length) // row) * row
        between = (end - first - len(starts) * length) * size
        if len(starts) > 1 and between < len(starts) * RUN_COST_BYTES:
            whole = self._read([first], end - first).view(-1, *self._shape[1:])
            return whole[(slice(None), *index[1:])]
        shape = [end - start for start, end in bounds]
        return self._read(starts, length).view(shape)

    def _read(self, starts: Sequence[int], length: int) -> torch.Tensor:
        """Return [len(starts) * length] numbers, `length` of them from each start on."""
        size = self._dtype.itemsize
        into = self._buffer.take(len(starts) * length * size)
        self._buffer.reader.read(
            self._memory,
            [
                (self._first + start * size, place * length * size, length * size)
                for place, start in enumerate(starts)
            ],
            into,
        )
        return into.view(self._dtype)


def runs(shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Return the starts of the contiguous runs that make up a slice of a contiguous tensor, and
    their length. `bounds`: (first, one past the last) along each dim."""
    inner = len(shape)
    while inner and bounds[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    if not inner:
        return [0], prod(shape)
    first, end = bounds[inner - 1]
    below = prod(shape[inner:])
    strides = [prod(shape[dim + 1 :]) for dim in range(inner)]
    outer = product(*(range(*bounds[dim]) for dim in range(inner - 1)))
    starts = [
        sum(place * stride for place, stride in zip((*places, first), strides, strict=True))
        for places in outer
    ]
    return starts, (end - first) * below
