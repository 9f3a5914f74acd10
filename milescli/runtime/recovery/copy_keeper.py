"""The process that holds copies of trainer ranks' state in its memory, on another node than theirs
where there is one. It knows bytes alone; `peer_copies` says which of them count. Imports nothing
heavy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class CopyKeeper:
    """Holds at most two copies of each rank: the one that counts, and the one that is coming in."""

    def __init__(self) -> None:
        """Holds nothing yet."""
        self._copies = dict[tuple[int, int], list[np.ndarray]]()
        """(copy, rank) -> [sections] bytes."""

    def begin(self, copy: int, rank: int, sizes: Sequence[int], *, keep: int) -> None:
        """Make room for a rank's part of a copy. `sizes`: bytes of its sections; `keep`: the copy
        that counts, or 0; what else there is of this rank gives its memory."""
        memory = list[np.ndarray]()
        for number in [n for n, r in self._copies if r == rank and n != keep]:
            memory = self._copies.pop((number, rank))
        if [section.size for section in memory] != list(sizes):
            del memory  # before as much again is taken
            memory = [np.empty(size, dtype=np.uint8) for size in sizes]
        self._copies[copy, rank] = memory

    def write(self, copy: int, rank: int, section: int, offset: int, part: np.ndarray) -> None:
        """Some bytes of it. Of a copy that was given up meanwhile: nothing is done."""
        if (copy, rank) in self._copies:
            self._copies[copy, rank][section][offset : offset + part.size] = part

    def read(self, copy: int, rank: int, section: int, offset: int, size_bytes: int) -> np.ndarray:
        """Some bytes of one that is whole."""
        return self._copies[copy, rank][section][offset : offset + size_bytes]
