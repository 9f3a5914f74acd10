"""What copies of the trainer's state take of main memory (`fault.copy_every`). Pure; called by
`memory`, which adds them to what ranks keep there, and by whoever notes why."""

from __future__ import annotations

from milescli.core.units import format_bytes
from milescli.plan.decisions import Log
from milescli.recipe.schema import Recipe

HELD = 3
"""Times the state: beside the rank, whence it is sent while the rank trains on; and with a keeper
the copy that counts and the one that is coming in."""


def copies_bytes(static: tuple[int, int, int], *, has_critic: bool, reference: int) -> int:
    """Of one rank, reckoned on its own node: a keeper on another holds as much of its neighbour's.
    `static`: weights, gradients (which are not copied) and optimizer of one model; `reference`:
    frozen weights, or 0."""
    return HELD * ((static[0] + static[2]) * (1 + has_critic) + reference)


def note_copies(recipe: Recipe, *, size_bytes: int, log: Log) -> None:
    """Nothing where none are taken. `size_bytes`: of one node."""
    every = recipe.fault.copy_every
    if not every:
        return
    where = "the next node" if recipe.machine.nodes > 1 else "a process beside"
    log.note(
        "fault.copy_every",
        every,
        f"{format_bytes(size_bytes)} of a node's main memory: of weights and optimizer one copy "
        f"beside each rank, and two in {where}; an estimate",
    )
