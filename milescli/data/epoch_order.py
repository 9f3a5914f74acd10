"""The order of rows within an epoch: a permutation that (seed, epoch) fixes, equal on every
machine."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LARGE_ORDER = 100_000
"""With more rows the order is made by numpy, and is another one."""


def epoch_order(num_prompts: int, *, seed: int, epoch: int, shuffle: bool) -> array[int]:
    """[num_prompts] a permutation that depends on nothing but its arguments: rows sorted by a hash
    of (seed, epoch, row). The hash is BLAKE2b; above LARGE_ORDER rows it is SplitMix64 (Steele et
    al., OOPSLA 2014) of the row, from a start that is the BLAKE2b hash of (seed, epoch)."""
    if not shuffle:
        return array("q", range(num_prompts))
    key = f"{seed}/{epoch}".encode()
    if num_prompts > LARGE_ORDER:
        return _large_order(num_prompts, key)
    ranks = [
        hashlib.blake2b(row.to_bytes(8, "little"), key=key, digest_size=16).digest()
        for row in range(num_prompts)
    ]
    return array("q", sorted(range(num_prompts), key=ranks.__getitem__))


def _large_order(num_prompts: int, key: bytes) -> array[int]:
    import numpy as np

    order = array("q")
    ranks = random_bits(num_prompts, key)
    order.frombytes(np.argsort(ranks, kind="stable").astype(np.int64).tobytes())
    return order


def random_bits(count: int, key: bytes) -> NDArray[np.uint64]:
    """[count] of 64 bits each, by SplitMix64."""
    import numpy as np

    start = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    ranks = np.arange(1, count + 1, dtype=np.uint64)
    ranks *= np.uint64(0x9E3779B97F4A7C15)
    ranks += np.uint64(start)
    ranks ^= ranks >> np.uint64(30)
    ranks *= np.uint64(0xBF58476D1CE4E5B9)
    ranks ^= ranks >> np.uint64(27)
    ranks *= np.uint64(0x94D049BB133111EB)
    ranks ^= ranks >> np.uint64(31)
    return ranks
