"""A profile of a run that goes on: taken between two steps, and never in its way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.events import EventBus, WorkerLost, WorkerReplaced
from milescli.profiling import request as files
from milescli.profiling.request import Progress, Request
from milescli.runtime.recording.profiler import Profiler
from tests.runtime.recovery.dying_ranks import Ranks, Rig

pytestmark = pytest.mark.usefixtures("a_second_a_look")


@dataclass
class ProfilingMixin:
    """A rig whose steps may be profiled."""

    folder: Path
    first: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        self.run = RunDir(self.folder)
        self.rig = Rig(self.folder, first=self.first)
        self.profiler = Profiler(
            self.run, trainer=lambda: self.rig.trainer, engines=dict, bus=EventBus()
        )

    def ask(self, **wanted: Any) -> int:
        number = files.next_number(self.run)
        files.write_request(
            self.run, Request(number=number, **{"steps": 2, "ranks": [0], **wanted})
        )
        return number

    async def steps(self, *numbers: int, loop: object = None) -> None:
        for number in numbers:
            await self.profiler.between(number - 1, loop=loop)
            await self.rig.step(number)

    def state(self, number: int) -> files.State:
        state = files.read_state(self.run, number)
        assert state is not None, "it is not begun"
        return state


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, timeout=60))


def test_a_profile_is_of_whole_steps_that_come_after_the_request(tmp_path: Path) -> None:
    made = ProfilingMixin(tmp_path)

    async def work() -> None:
        await made.steps(1)
        number = made.ask(ranks=[0, 7], engines=[5])
        await made.steps(2, 3)
        assert made.state(number).progress is Progress.BEGUN
        await made.steps(4)
        state = made.state(number)
        assert (state.progress, state.first_step, state.last_step) == (Progress.DONE, 2, 3)
        assert state.ranks["0"]["file"] == "rank_0.json.gz"
        assert state.ranks["7"] == {"error": "the run has no such rank"}
        assert state.engines["5"] == {"error": "the run has no such engine"}

    _run(work())
    assert made.rig.ranks.weights == [1, 2, 3, 4]


def test_one_that_is_taken_back_ends_with_the_step(tmp_path: Path) -> None:
    made = ProfilingMixin(tmp_path)

    async def work() -> None:
        number = made.ask(steps=10)
        await made.steps(1)
        files.cancel_request(made.run, number)
        await made.steps(2)
        assert made.state(number).last_step == 1
        await made.steps(3)
        again = made.ask(steps=1)
        await made.steps(4, 5)
        assert made.state(again).progress is Progress.DONE

    _run(work())


def test_the_end_of_a_run_ends_its_profile(tmp_path: Path) -> None:
    made, ended = ProfilingMixin(tmp_path / "a"), ProfilingMixin(tmp_path / "b")

    async def work() -> None:
        well, badly = made.ask(steps=9), ended.ask(steps=9)
        await made.steps(1, 2)
        await made.profiler.finish(2)
        await ended.steps(1)
        ended.profiler.leave()
        state = made.state(well)
        assert (state.progress, state.last_step) == (Progress.DONE, 2)
        assert ended.state(badly).progress is Progress.ENDED

    for one in (made, ended):
        one.folder.mkdir()
    _run(work())


@pytest.mark.parametrize("dies_in", [{"step": 2}, {"start_profile": 1}, {"stop_profile": 1}])
def test_ranks_that_die_while_they_are_profiled_are_replaced(tmp_path: Path, dies_in) -> None:
    made = ProfilingMixin(tmp_path, first=Ranks(dies_in=dies_in))

    async def work() -> None:
        number = made.ask()
        await made.steps(1, 2, 3)
        state = made.state(number)
        assert state.progress is Progress.DONE
        is_lost = "start_profile" not in dies_in  # then the new ranks are traced
        assert ("error" in state.ranks["0"]) is is_lost

    _run(work())
    assert made.rig.ranks.weights == [1, 2, 3]
    assert made.rig.kinds == [WorkerLost, WorkerReplaced]


def test_what_was_asked_of_an_earlier_attempt_ends_with_it(tmp_path: Path) -> None:
    first = ProfilingMixin(tmp_path)
    number = first.ask()
    later = ProfilingMixin(tmp_path)
    _run(later.steps(1))
    assert later.state(number).progress is Progress.ENDED and not files.is_pending(later.run)
    assert later.rig.ranks.traced == []


def test_of_several_loops_the_steps_of_one_are_counted(tmp_path: Path) -> None:
    made = ProfilingMixin(tmp_path)

    async def work() -> None:
        await made.steps(1, loop="a")
        number = made.ask(steps=1)
        await made.steps(2, loop="a")
        await made.steps(7, 8, loop="b")
        assert made.state(number).progress is Progress.BEGUN
        await made.steps(3, loop="a")
        assert made.state(number).last_step == 2

    _run(work())


def test_of_several_loops_the_end_of_the_one_that_began_it_ends_it(tmp_path: Path) -> None:
    made = ProfilingMixin(tmp_path)

    async def work() -> None:
        number = made.ask(steps=5)
        await made.steps(1, loop="a")
        await made.profiler.finish(9, loop="b")
        assert made.state(number).progress is Progress.BEGUN
        await made.profiler.finish(1, loop="a")
        assert (made.state(number).progress, made.state(number).last_step) == (Progress.DONE, 1)

    _run(work())
