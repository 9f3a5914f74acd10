"""The named diagnoses: functions of a Case that return a Finding, or None. One file for each
subject; a verdict runs those in `ALL`."""

from __future__ import annotations

from collections.abc import Callable

from milescli.insight.case import Case, Finding
from milescli.insight.diagnoses import (
    engines,
    gradient,
    policy,
    responses,
    rewards,
    rows,
    speed,
    staleness,
)

Diagnosis = Callable[[Case], Finding | None]

ALL: tuple[Diagnosis, ...] = (
    *gradient.ALL,
    *rewards.ALL,
    *policy.ALL,
    *responses.ALL,
    *engines.ALL,
    *staleness.ALL,
    *rows.ALL,
    *speed.ALL,
)

NAMES = tuple(each.__name__.replace("_", "-") for each in ALL)
"""Names of the findings."""
HINTS = tuple(each.__name__.replace("_", "-") for each in speed.ALL)
"""Names of the findings that are only hints: no event reports them."""
