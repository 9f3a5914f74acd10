"""Holds copies of trainer ranks' state in the memory of a process, on another node than theirs if
there is one. It only stores bytes; `peer_copies` decides which copies are valid. Imports nothing
heavy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class CopyKeeper:
    """Holds at most two copies of each rank: the valid one, and one that is being received."""

    def __init__(self) -> None:
        """Start without copies."""
        self._copies = dict[tuple[int, int], list[np.ndarray]]()
        """(copy, rank) -> [sections] bytes."""

    def begin(self, copy: int, rank: int, sizes: Sequence[int], *, keep: int) -> None:
        """Allocate memory for a rank's part of a copy. `sizes`: bytes of its sections; `keep`: the
        valid copy, or 0; the memory of the rank's other copies is reused."""
        memory = list[np.ndarray]()
        for number in [n for n, r in self._copies if r == rank and n != keep]:
            memory = self._copies.pop((number, rank))
        if [section.size for section in memory] != list(sizes):
            del memory  # before as much again is taken
            memory = [np.empty(size, dtype=np.uint8) for size in sizes]
        self._copies[copy, rank] = memory

    def write(self, copy: int, rank: int, section: int, offset: int, part: np.ndarray) -> None:
        """Write some bytes of a copy; ignored if the copy was given up in the meantime."""
        if (copy, rank) in self._copies:
            self._copies[copy, rank][section][offset : offset + part.size] = part

    def read(self, copy: int, rank: int, section: int, offset: int, size_bytes: int) -> np.ndarray:
        """Return some bytes of a complete copy."""
        return self._copies[copy, rank][section][offset : offset + size_bytes]
