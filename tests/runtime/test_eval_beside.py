"""Evaluations on engines of their own: one at a time, by the weights of their step, and heard of
where one fails."""

from __future__ import annotations

import asyncio

import pytest

from milescli.core.errors import RewardError
from milescli.core.types import EVALUATION, WeightVersion
from milescli.runtime.devices import Devices
from milescli.runtime.evaluator import EvaluationsBeside
from tests.runtime.recorder import Recorder


def _beside(told: list[str], *, fails_at: int | None = None) -> EvaluationsBeside:
    async def measure(step: int) -> None:
        told.append(f"asked {step}")
        await asyncio.sleep(0.01)
        if step == fails_at:
            raise RewardError("no score", why="planted", fix="none")
        told.append(f"done {step}")

    devices = Devices(
        taking_turns=False,
        trainer=Recorder("trainer", told),
        engines=Recorder("engines", told),
        fleet=EVALUATION,
    )
    return EvaluationsBeside(devices, measure, tell=told.append)


async def _begin(beside: EvaluationsBeside, step: int) -> None:
    await beside.begin(step, WeightVersion(step), verify=False)


PUBLISH = ["engines.pause", "trainer.publish", "engines.resume"]
FIRST = ["engines.pause", "trainer.connect_engines", "trainer.publish", "engines.resume"]


def test_weights_change_only_between_two_evaluations() -> None:
    told: list[str] = []

    async def work() -> None:
        beside = _beside(told)
        for step in (0, 2):
            await _begin(beside, step)
            await asyncio.sleep(0)
            told.append(f"trained {step + 1}")
        await beside.finish()

    asyncio.run(work())
    assert told == [
        *(*FIRST, "asked 0", "trained 1", "done 0"),
        *(*PUBLISH, "asked 2", "trained 3", "done 2"),
    ]


def test_a_failure_is_heard_of_while_the_run_goes_on() -> None:
    async def work() -> None:
        beside = _beside([], fails_at=2)
        await beside.probe()
        await _begin(beside, 2)
        await beside.probe()
        await asyncio.sleep(0.05)
        for heard in (beside.probe, beside.finish, lambda: _begin(beside, 4)):
            with pytest.raises(RewardError, match="no score"):
                await heard()
        await beside.drop()

    asyncio.run(work())


def test_what_is_dropped_says_nothing_more() -> None:
    told: list[str] = []

    async def work() -> None:
        beside = _beside(told)
        await _begin(beside, 1)
        await asyncio.sleep(0)
        await beside.drop()
        await beside.probe()
        await beside.finish()

    asyncio.run(work())
    assert told == [*FIRST, "asked 1"]


def test_one_whose_engines_died_is_given_up_and_the_next_goes_on() -> None:
    told: list[str] = []

    async def work() -> None:
        beside = _beside(told)
        await _begin(beside, 1)
        await asyncio.sleep(0)
        finishing = asyncio.ensure_future(beside.finish())
        await asyncio.sleep(0)
        beside.give_up()
        await finishing
        await _begin(beside, 2)
        await beside.finish()

    asyncio.run(work())
    assert told[len(FIRST) :] == [
        "asked 1",
        "the evaluation of step 1 was given up: its engines died",
        *(*PUBLISH, "asked 2", "done 2"),
    ]
