"""Steps over rows and demonstrations, by a trainer that changes nothing; and what workers hold is
reported when it is new or has changed. Real trainers learn in tests/end_to_end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from milescli.core.errors import Stopped
from milescli.core.events import (
    Event,
    EventBus,
    FlowStats,
    MemorySeen,
    PhaseStarted,
    RolloutStats,
    RowStepDone,
    StepDone,
    WarmupStepDone,
    WorkerMemory,
)
from milescli.core.types import Group, StepReport, WeightVersion
from milescli.data.examples import Examples
from milescli.recipe.load import load
from milescli.recipe.schema import Recipe
from milescli.runtime.devices import Devices
from milescli.runtime.loop import Hooks, MemoryReports, Run, learn
from milescli.runtime.recovery.supervise import StopFlag
from milescli.runtime.sources import Demonstrations, Groups, Rows, Source
from milescli.train.base import StepResult, Trainer
from milescli.train.objectives import load_objective
from tests.plans import PLAN
from tests.runtime.recording.recorder import Recorder
from tests.samples import make_trajectory, rewarded


def rank(number: int, size: int) -> WorkerMemory:
    return WorkerMemory(worker=f"trainer rank {number}", device="cuda:0", peak_bytes=size)


def test_only_what_has_changed_is_told() -> None:
    told, news = list[Event](), MemoryReports()
    bus = EventBus(listeners=[told.append])
    for step, sizes in enumerate(((1000, 1000), (1010, 1000), (1030, 1000), (1030, 900)), start=1):
        workers = tuple(rank(number, size) for number, size in enumerate(sizes))
        news.report(bus, step=step, workers=workers)
    assert told == [
        MemorySeen(step=1, workers=(rank(0, 1000), rank(1, 1000))),
        MemorySeen(step=3, workers=(rank(0, 1030),)),
        MemorySeen(step=4, workers=(rank(1, 900),)),
    ]


REPORT = StepReport(
    loss=0.5,
    grad_norm=1.0,
    lr=1e-6,
    logprob_diff_mean=0.0,
    logprob_diff_max=0.0,
    logprob_diff_tokens=0,
    num_tokens=100,
    num_loss_tokens=50,
    num_microbatches=1,
    forward_backward_s=1.0,
    optimizer_s=0.1,
    figures={},
)


class _Trainer(Trainer):
    """Notes its calls, and takes steps that change nothing."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.notes.append(method)
        return StepResult(report=REPORT) if method == "step" else None


def _run(
    source: Source, notes: list[str], *, engines: Recorder | None = None, **hooks: Any
) -> list[Event]:
    """Learn from the source; returns its events, and adds hooks and calls to `notes`."""
    events, trainer = list[Event](), _Trainer(notes)
    devices = None
    if engines is not None:
        devices = Devices(shares_memory=False, trainer=trainer, engines=engines)  # type: ignore[arg-type]
    run = Run(
        plan=PLAN,
        bus=EventBus(listeners=[events.append]),
        source=source,
        objective=load_objective(source.objective, source.recipe),
        trainer=trainer,
        devices=devices,
        hooks=Hooks(**hooks),
        stop=StopFlag(),
    )
    asyncio.run(learn(run))
    assert run.step == source.num_steps
    return events


def _recipe(tmp_path: Path, *sets: str) -> Recipe:
    return load("quickstart", sets=list(sets), environ={}, cwd=tmp_path, home=tmp_path).recipe


def test_a_warm_up_steps_and_reports_and_does_nothing_else(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, "warmup.steps=3", "warmup.batch_size=4")
    notes = list[str]()
    source = Demonstrations(recipe, [make_trajectory([1], [2, 3]), make_trajectory([4], [5, 6])])
    first, *steps = _run(source, notes)
    assert first == PhaseStarted(phase="warmup", detail="3 supervised steps")
    assert [(type(each), each.step, each.num_steps) for each in steps] == [  # type: ignore[union-attr]
        (WarmupStepDone, step, 3) for step in (1, 2, 3)
    ]
    assert notes == ["step"] * 3


@pytest.mark.parametrize("done", [0, 1, 4, 7])
def test_a_warm_up_that_goes_on_takes_what_it_would_have_taken(tmp_path: Path, done: int) -> None:
    recipe = _recipe(tmp_path, "warmup.steps=7", "warmup.batch_size=3")
    shown = [make_trajectory([1], [number]) for number in range(5)]

    async def taken(begun: int) -> list[Any]:
        source = Demonstrations(recipe, shown)
        source.start(begun, version=WeightVersion(0))
        steps = range(begun + 1, source.num_steps + 1)
        return [await source.take(step, version=WeightVersion(0)) for step in steps]

    assert asyncio.run(taken(done)) == asyncio.run(taken(0))[done:]


HOOKS = ("between", "taken", "save", "keep", "done", "evaluate")


def _noting(notes: list[str]) -> dict[str, Callable[..., Awaitable[None]]]:
    """Hooks that write down that they were called."""

    def noting(name: str) -> Callable[..., Awaitable[None]]:
        async def noted(*_: Any) -> None:
            notes.append(name)

        return noted

    return {name: noting(name) for name in HOOKS}


def test_a_step_of_rows_is_trained_saved_reported_and_evaluated_in_this_order(
    tmp_path: Path,
) -> None:
    recipe = _recipe(tmp_path, "train.steps=2")
    recipe = recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"objective": "supervised"})}
    )
    notes = list[str]()
    rows = Examples([make_trajectory([1], [2, 3])], seed=0, shuffle=False)
    events = _run(Rows(recipe, rows), notes, **_noting(notes))
    one = ["between", "taken", "step", "save", "keep", "done", "evaluate"]
    assert notes == one * 2
    assert [type(event) for event in events] == [PhaseStarted, RowStepDone, RowStepDone]
    assert [event.epoch for event in events[1:]] == [  # type: ignore[union-attr]
        step * recipe.train.batch_size for step in (1, 2)
    ]


def test_a_stop_ends_the_loop_before_the_next_step(tmp_path: Path) -> None:
    source = Demonstrations(_recipe(tmp_path, "warmup.steps=3"), [make_trajectory([1], [2, 3])])
    stop, taken = StopFlag(), list[int]()
    take = source.take

    async def take_and_stop(step: int, **version: Any) -> list[Any]:
        taken.append(step)
        items = await take(step, **version)
        stop.set()
        return items

    source.take = take_and_stop  # type: ignore[method-assign]
    run = Run(
        plan=PLAN,
        bus=EventBus(),
        source=source,
        objective=load_objective("supervised", source.recipe),
        trainer=_Trainer([]),
        devices=None,
        hooks=Hooks(),
        stop=stop,
    )
    with pytest.raises(Stopped):
        asyncio.run(learn(run))
    assert taken == [1] and run.step == 1


class _Collector:
    """Gives one group a step, and notes what it is told."""

    stats = RolloutStats(
        **dict.fromkeys((each.name for each in fields(RolloutStats)), 1.0)  # type: ignore[arg-type]
    )
    flow = FlowStats()

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def start(self, *, version: int, first_step: int, last_step: int) -> None:
        self.notes.append(f"start at {version} for {first_step} to {last_step}")

    def on_published(self, version: int) -> None:
        self.notes.append(f"published {version}")

    async def take(self, step: int, *, version: int) -> list[Group]:
        self.notes.append(f"take {step} at {version}")
        return [rewarded([0.0, 1.0]), rewarded([1.0, 0.0])]


def test_what_a_step_of_groups_learned_is_published_before_it_is_reported(tmp_path: Path) -> None:
    recipe, notes = _recipe(tmp_path, "train.steps=2"), list[str]()
    source = Groups(recipe, _Collector(notes))  # type: ignore[arg-type]
    events = _run(source, notes, engines=Recorder("engines", notes), **_noting(notes))
    assert notes[0] == "start at 0 for 1 to 2"
    assert notes[1 : len(notes) // 2 + 1] == [
        "between",
        "take 1 at 0",
        "taken",
        "step",
        "save",
        "engines.pause",
        "connect_engines",
        "publish",
        "engines.resume",
        "published 1",
        "keep",
        "done",
        "evaluate",
    ]
    assert notes[-3:] == ["keep", "done", "evaluate"]
    assert [type(event) for event in events] == [PhaseStarted, StepDone, StepDone]
    assert [(event.step, event.version) for event in events[1:]] == [(1, 1), (2, 2)]  # type: ignore[union-attr]
