"""Computes where a run's time went, as intervals: what each actor did from when to when. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from milescli.core.events import PHASES
from milescli.core.history import History

_ACTOR = {
    "rollout": "rollout",
    "pack": "driver",
    "train": "trainer",
    "save": "trainer",
    "publish": "weights",
}
"""Phase -> the actor that works in it, as the driver sees it."""
STEP_ACTORS = frozenset(_ACTOR.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Describes what an actor did between two times, seconds since 1970."""

    actor: str
    """rollout, trainer, driver, weights, evaluation, checkpoint; or a worker that was lost."""
    what: str
    """A phase, eval, checkpoint, silent, lost."""
    begin_s: float
    end_s: float
    step: int | None = None


def of_steps(history: History, *, first: int, last: int) -> list[Interval]:
    """Return the phases of the steps `first` to `last`. A phase that took no time is left out."""
    columns = history.columns
    spent = {phase: columns.get(f"time/{phase}_s") for phase in PHASES}
    whole = columns.get("time/step_s")
    intervals = list[Interval]()
    for place, step in enumerate(columns.steps):
        if not first <= step <= last or math.isnan(columns.times[place]):
            continue
        at = columns.times[place] - whole[place]
        for phase in PHASES:
            seconds = spent[phase][place]
            if seconds > 0:  # not of NaN either
                intervals.append(
                    Interval(
                        actor=_ACTOR[phase], what=phase, begin_s=at, end_s=at + seconds, step=step
                    )
                )
                at += seconds
    return intervals


def of_run(history: History) -> list[Interval]:
    """Return the phases of the whole run: start, warmup, check, train, eval, ...; the current phase
    lasts until the newest record."""
    spans = [(span.phase, span.begin_s, span.end_s) for span in history.spans]
    if history.phase and history.last_s > history.phase_s:
        spans.append((history.phase, history.phase_s, history.last_s))
    return [
        Interval(actor="run", what=phase, begin_s=begin_s, end_s=end_s)
        for phase, begin_s, end_s in spans
    ]


def beside_steps(history: History) -> Iterable[Interval]:
    """Yield evaluations, checkpoints and healings. Those that have not ended yet last until the
    newest record."""
    for one in history.evaluations:
        yield Interval(
            actor="evaluation",
            what="eval",
            begin_s=one.time_s - one.seconds,
            end_s=one.time_s,
            step=one.step,
        )
    for notice in history.notices:
        if notice.kind == "CheckpointSaved":
            yield Interval(
                actor="checkpoint",
                what="save",
                begin_s=notice.time_s - notice.seconds,
                end_s=notice.time_s,
                step=notice.step,
            )
    for healing in history.healings:
        end_s = history.last_s if healing.replaced_s is None else healing.replaced_s
        yield Interval(
            actor=healing.worker,
            what="lost",
            begin_s=healing.lost_s,
            end_s=end_s,
            step=healing.step,
        )
