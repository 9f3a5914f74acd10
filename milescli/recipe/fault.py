"""What a run does where one of its processes dies. Part of the schema."""

from __future__ import annotations

from milescli.recipe.section import NonNegative, NonNegativeFloat, PositiveFloat, Section


class Fault(Section):
    """Bounds on starting again what has died. A run that meets one ends with the cause."""

    max_restarts: NonNegative = 8
    """Engines, routers and trainers that are started in the place of dead ones within `window_s`;
    0: the first death ends the run."""
    window_s: PositiveFloat = 3600.0
    kept_gib: PositiveFloat = 4.0
    """Batches of the steps since a checkpoint that the driver keeps, for new trainer ranks to do
    again; beyond, those before the newest copy go, then all: a rank's death ends the run until the
    next copy (`copy_every`) or checkpoint (`checkpoint.every`)."""
    copy_every: NonNegative = 0
    """Steps after which the trainer's weights, optimizer and random numbers are copied to the main
    memory of another process, of several nodes on the next one; new trainer ranks begin from it
    where it is newer than the checkpoint. 0: never, as copies take three times that state."""
    journal_gib: NonNegativeFloat = 4.0
    """What journal/ may hold of finished samples, which a resumed run takes instead of sampling
    them again; beyond, none are kept until the next checkpoint. 0: no journal."""
