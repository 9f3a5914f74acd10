"""Processes that collect ask whoever the driver names: an engine in the place of a dead one, also
of a role, and another process with the reward model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from milescli.core.errors import WaitTimeout, WorkerDied
from milescli.core.types import EngineAddress, WeightVersion
from milescli.recipe.machine import MachineSettings
from milescli.runtime.collecting.followers import FleetFollower, FollowedScorer
from milescli.runtime.collecting.workers import Workers
from tests.waiting import until_async

ENGINES = [EngineAddress(url=f"http://127.0.0.1:{n}", name=f"engine {n}") for n in range(3)]


class _Handle:
    """A process that notes its calls, or dies of them."""

    def __init__(self, *, dies: bool = False, replies: object = None) -> None:
        self.calls, self.dies, self.replies = list[tuple[Any, ...]](), dies, replies

    async def run(self, method: str, *args: Any, timeout_s: float, **options: Any) -> Any:
        """Note a call."""
        self.calls.append((method, *args))
        if self.dies:
            raise WorkerDied("it died", why="a test", fix=[])
        return self.replies


def _workers(*handles: _Handle | None) -> Workers:
    workers = Workers(len(handles), timeout_s=60.0)
    for worker, handle in zip(workers, handles, strict=True):
        worker.handle = handle  # type: ignore[assignment]
    return workers


def _fleet(**given: Any) -> Any:
    usual = {"engines": ENGINES, "is_paused": False, "version": WeightVersion(2)}
    return SimpleNamespace(**usual, closed=frozenset(), followers=None, **given)


def test_each_process_has_its_share_of_the_policys_engines_and_all_of_a_role() -> None:
    async def run() -> None:
        handles = [_Handle(), _Handle()]
        workers, fleet = _workers(*handles), _fleet()
        policy, role = FleetFollower(workers, fleet), FleetFollower(workers, fleet, policy="old")
        policy.begin()
        assert fleet.followers is policy
        role.use(ENGINES)
        await until_async(lambda: all(len(handle.calls) == 2 for handle in handles))
        assert handles[0].calls == [("use", ENGINES[::2], None), ("use", ENGINES, "old")]
        assert handles[1].calls == [("use", ENGINES[1:2], None), ("use", ENGINES, "old")]
        fleet.engines = ENGINES[1:2]
        assert policy.engines_of(next(iter(workers))) == ENGINES[1:2], "none of its own lives"
        policy.end()
        assert fleet.followers is None

    asyncio.run(run())


def test_what_died_is_left_out_and_not_waited_for() -> None:
    async def run() -> list[Any]:
        return await _workers(_Handle(replies=1), None, _Handle(dies=True)).call_all("pause")

    assert asyncio.run(run()) == [1]


def test_scores_are_asked_again_of_another_process() -> None:
    dead, living = _Handle(dies=True), _Handle(replies=3.0)

    async def run() -> None:
        scorer = FollowedScorer(cluster=None, settings=MachineSettings())  # type: ignore[arg-type]
        asking = asyncio.ensure_future(scorer.call("look"))
        scorer.follow(dead)  # type: ignore[arg-type]
        await until_async(lambda: bool(dead.calls))
        assert not asking.done()
        scorer.follow(living)  # type: ignore[arg-type]
        assert await asyncio.wait_for(asking, 120.0) == [3.0]

    asyncio.run(run())


def test_a_process_that_never_comes_is_not_waited_for_without_end() -> None:
    async def run() -> None:
        settings = MachineSettings(start_timeout_s=0.01)
        await FollowedScorer(cluster=None, settings=settings).call("look")  # type: ignore[arg-type]

    with pytest.raises(WaitTimeout, match="reward model"):
        asyncio.run(asyncio.wait_for(run(), 120.0))
