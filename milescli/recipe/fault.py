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
    again; beyond, a rank's death ends the run until the next checkpoint (`checkpoint.every`)."""
    journal_gib: NonNegativeFloat = 4.0
    """What journal/ may hold of finished samples, which a resumed run takes instead of sampling
    them again; beyond, none are kept until the next checkpoint. 0: no journal."""
