"""Which predicted times count as equal: estimates are not good enough for more. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from milescli.plan.search_engines import EngineChoice
from milescli.plan.search_trainer import TrainerChoice

ALIKE = 1.10
"""Layouts whose predicted times are within this factor count as equally fast: the one that is cut
least is taken."""
STEP_ALIKE = 0.03
"""Nor are trainers that differ by less than this part of a whole step."""

_Choice = TypeVar("_Choice", TrainerChoice, EngineChoice)


def alike_s(best: float, *, beside: float = 0.0) -> float:
    """Seconds up to which a phase is about as long as one of `best` seconds; `beside`: seconds of
    the step that pass otherwise."""
    return max(ALIKE * best, best + STEP_ALIKE * (best + beside))


def alike(choices: Sequence[_Choice], *, beside: float = 0.0) -> list[_Choice]:
    """Those about as fast as the first, which is the fastest; `beside`: seconds of a step that pass
    meanwhile or otherwise."""
    if not choices:
        return []
    most = alike_s(choices[0].seconds.total, beside=beside)
    return [choice for choice in choices if choice.seconds.total <= most]
