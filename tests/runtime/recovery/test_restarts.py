"""What is killed while it starts is started again; what says what is wrong with it is not."""

from __future__ import annotations

import asyncio

import pytest

from milescli.core.errors import MachineError, MilesError, WorkerKilled
from milescli.core.events import EventBus, WorkerLost, WorkerReplaced
from milescli.recipe.machine import Fault
from milescli.runtime.recovery.restarts import Repairs, Restarts, retry_start


def _start(*errors: MilesError, max_restarts: int = 10) -> list[object]:
    """[events, then what came of it], where so many starts fail."""
    left, events = list(errors), list[object]()
    restarts = Restarts(limits=Fault(max_restarts=max_restarts))
    repairs = Repairs(bus=EventBus([events.append]), restarts=restarts)

    async def start() -> str:
        if left:
            raise left.pop(0)
        return "there"

    try:
        events.append(asyncio.run(retry_start("engine 0", start, repairs=repairs)))
    except MilesError as error:
        events.append(error)
    return events


def _killed() -> WorkerKilled:
    return WorkerKilled("engine 0 ended while it started", why="SIGKILL", fix="none")


def test_one_that_is_killed_while_it_starts_is_started_again() -> None:
    lost, replaced, came = _start(_killed())
    assert isinstance(lost, WorkerLost) and lost.worker == "engine 0"
    assert isinstance(replaced, WorkerReplaced) and came == "there"


@pytest.mark.parametrize("bound", [{}, {"max_restarts": 1}])
def test_it_is_started_again_as_often_as_it_may_be(bound: dict[str, int]) -> None:
    *losses, error = _start(*(_killed() for _ in range(9)), **bound)
    assert len(losses) == bound.get("max_restarts", 2)
    assert isinstance(error, WorkerKilled)
    assert "fault.max_restarts is 1" in error.why if bound else "died 3 times" in error.why


def test_what_says_what_is_wrong_with_it_is_not_started_again() -> None:
    wrong = MachineError("no such device", why="planted", fix="none")
    assert _start(wrong) == [wrong]
