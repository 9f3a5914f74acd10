"""A run as trackers are told of it, and a begun tracker that is told of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from milescli.core.events import CheckpointSaved, Event, PhaseStarted, WorkerReplaced, to_record
from milescli.core.scalars import scalars_in
from milescli.trackers.base import TrackedRun, Tracker
from tests.fake_run import eval_done, step_done

BEGAN_S = 1.8e9
"""Unix time of the first event; each takes ten seconds."""
RECIPE = {"train.steps": 4, "rollout.reward": {"math": 1.0}, "data.eval": None, "name": "sums"}


def run_in(folder: Path, *, first_step: int = 0, mark: str = "4f2a90c1") -> TrackedRun:
    """As `runtime.tracking` makes it. `mark`: what its id has of its own."""
    return TrackedRun(
        name="sums-1",
        id=f"sums-1-{mark}",
        project="sums",
        folder=folder,
        version="0.1.0",
        first_step=first_step,
        recipe=RECIPE,
    )


def events(*steps: int) -> list[Event]:
    """A phase, these steps, and what comes beside them."""
    return [
        PhaseStarted(phase="train", detail="steps 1 to 4"),
        *(step_done(step, 4, reward=step / 10) for step in steps),
        eval_done(steps[-1], 0.5),
        CheckpointSaved(step=steps[-1], path="checkpoints/step", size_bytes=10, seconds=2.0),
        WorkerReplaced(worker="engine 1", step=steps[-1], seconds=3.0),
    ]


def records(told: Sequence[Event]) -> list[dict[str, Any]]:
    """As a tracker is given them."""
    return [
        {**to_record(event), "unix_s": BEGAN_S + 10.0 * place}
        for place, event in enumerate(told, 1)
    ]


def tell(tracker: Tracker, told: Sequence[Event], *, outcome: str = "done") -> None:
    """All of it, and the end."""
    for record in records(told):
        if (scalars := scalars_in(record)) is not None:
            tracker.log(*scalars)
        tracker.event(record)
    tracker.close(outcome)
