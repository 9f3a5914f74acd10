"""Rows that are nothing but a number, for environments that draw their own beginnings: the number
is the row's label, and what the policy sees is what the environment shows at its reset. Read as
`task:seeds`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

NUM_ROWS, NUM_HELDOUT = 8192, 256


def rows(*, seed: int) -> Iterator[Mapping[str, str]]:
    """Numbers to train on; others for another run's seed."""
    first = NUM_HELDOUT + seed * NUM_ROWS
    return map(_row, range(first, first + NUM_ROWS))


def heldout_rows(*, seed: int) -> Iterator[Mapping[str, str]]:
    """Numbers that no run trains on, the same for each."""
    return map(_row, range(NUM_HELDOUT))


def _row(number: int) -> Mapping[str, str]:
    return {"prompt": f"Episode {number}.", "label": str(number)}
