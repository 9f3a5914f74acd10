"""The named diagnoses: each a function of a Case that gives a Finding, or None. One file for each
subject; `ALL` is what a verdict goes through."""

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
"""As findings are called."""
HINTS = tuple(each.__name__.replace("_", "-") for each in speed.ALL)
"""Of them those that are hints and nothing more: no event tells of them."""
