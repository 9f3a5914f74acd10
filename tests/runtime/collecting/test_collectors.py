"""Processes that collect, in memory, so that one dies on demand: what the driver asks for it gets,
in the order of the prompts, also of a successor."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from milescli.core.errors import WorkerDied
from milescli.core.events import EventBus, WorkerReplaced
from milescli.core.types import EngineAddress, Group, WeightVersion
from milescli.recipe.schema import Recipe
from milescli.rollout.base import RolloutEngine
from milescli.rollout.collect.collector import Collector
from milescli.runtime.collecting.collectors import Collectors
from milescli.runtime.collecting.process import CollectorProcess
from milescli.runtime.recovery.restarts import Repairs, Restarts
from milescli.train.objectives import load_objective
from milescli.train.objectives.policy import Policy
from tests.rollout.engines import ScriptedEngine, decode, make_episodes, make_source

ENGINES = tuple(EngineAddress(url=f"http://127.0.0.1:{n}", name=f"engine {n}") for n in (8, 9))
RECIPE = Recipe.model_validate(
    {
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2},
        "train": {"objective": "policy"},
    }
)


class _Tokenizer:
    """Has what a process needs of one."""

    decode = staticmethod(decode)


class _Process(CollectorProcess):
    """Asks a scripted engine."""

    @property
    def engine(self) -> RolloutEngine:
        return ScriptedEngine()


class _Handle:
    """Calls a process of this one, until it is dead."""

    def __init__(self, process: CollectorProcess, dies_in: str | None) -> None:
        self.process, self.dies_in = process, dies_in
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method; where the process dies in it, all its calls end with that."""
        if method == self.dies_in and not self.death.done():
            self.death.set_result(None)
        call = asyncio.ensure_future(getattr(self.process, method)(*args))
        await asyncio.wait([call, self.death], return_when=asyncio.FIRST_COMPLETED)
        if self.death.done():
            call.cancel()
            raise WorkerDied(f"died in {method}", why="a test", fix=[])
        return await call

    async def run_in_parts(
        self, method: str, *args: Any, num_parts: int, timeout_s: float
    ) -> tuple[Any, list[Any]]:
        """The same, of a method that returns parts."""
        first, *parts = await self.run(method, *args, timeout_s=timeout_s)
        assert len(parts) == num_parts
        return first, parts


class _Fleet:
    """Stands for the driver's client of the engines."""

    followers = None
    engines = ENGINES
    is_paused = False
    version = WeightVersion(0)


async def _nothing(_: object) -> None:
    """End no process."""


async def _collected(recipe: Recipe, *, dies_in: str | None) -> tuple[list[Group], Any, list[str]]:
    """(groups of a step, its shards, names of what was replaced). The first process that is
    started dies in that method."""
    bus, replaced, started = EventBus(), list[str](), list[int]()
    bus.listeners.append(
        lambda event: replaced.append(event.worker) if isinstance(event, WorkerReplaced) else None
    )

    async def start(number: int, engines: list[EngineAddress]) -> Any:
        started.append(number)
        process = _Process(
            recipe=recipe,
            tokenizer=_Tokenizer(),  # type: ignore[arg-type]
            vocab_size=16,
            fleet={"router_url": None, "engines": engines},
            version=WeightVersion(0),
            is_paused=False,
            with_greedy=False,
            journal=None,
        )
        return _Handle(process, dies_in if len(started) == 1 else None)

    collectors = Collectors(
        start,
        _nothing,
        count=2,
        recipe=recipe,
        fleet=_Fleet(),  # type: ignore[arg-type]
        journal=None,
        repairs=Repairs(bus=bus, restarts=Restarts(limits=recipe.fault)),
        warn=print,
    )
    await collectors.open()
    episodes = make_episodes(ScriptedEngine())
    collector = Collector(make_source(), episodes, recipe=recipe, elsewhere=collectors)
    groups = await collector.take(1, version=WeightVersion(0))
    policy = load_objective("policy", recipe)
    assert isinstance(policy, Policy)
    settings = {"objective": "policy", "dp": 2, "max_tokens_per_microbatch": 8}
    batch = await collectors.batch(groups, policy, **settings)
    shards = [shard.whole(shard.pieces) for shard in batch.shards]  # type: ignore[union-attr]
    whole = await collectors.whole(groups[:1])
    assert whole[0].samples[0].trajectories[0].num_tokens == len(groups[0].prompt.token_ids) + 1
    await collectors.close()
    return groups, shards, replaced


def _run(dies_in: str | None = None) -> tuple[list[Group], Any, list[str]]:
    rollout = RECIPE.rollout.model_copy(update={"reward": "length"})
    recipe = RECIPE.model_copy(update={"rollout": rollout})
    return asyncio.run(asyncio.wait_for(_collected(recipe, dies_in=dies_in), 120.0))


def test_a_process_that_starts_while_weights_are_sent_hears_when_they_are() -> None:
    fleet, calls = _Fleet(), list[tuple[Any, ...]]()
    fleet.is_paused = True

    class Handle:
        async def run(self, method: str, *args: Any, timeout_s: float) -> Any:
            calls.append((method, *args))
            if method == "pause":  # meanwhile
                fleet.is_paused, fleet.version = False, WeightVersion(1)
            await asyncio.sleep(3600 if method == "finished" else 0)

    async def start(number: int, engines: list[EngineAddress]) -> Any:
        return Handle()

    async def run() -> None:
        repairs = Repairs(bus=EventBus(), restarts=Restarts(limits=RECIPE.fault))
        options = {"count": 1, "recipe": RECIPE, "journal": None, "repairs": repairs, "warn": print}
        collectors = Collectors(start, _nothing, fleet=fleet, **options)  # type: ignore[arg-type]
        await collectors.open()
        await collectors.close()

    asyncio.run(asyncio.wait_for(run(), 120.0))
    assert calls[:3] == [("open",), ("pause",), ("reopen", 1)]


def test_groups_come_in_the_order_of_the_prompts_and_all_sequences_reach_a_rank() -> None:
    groups, shards, replaced = _run()
    assert [group.prompt.index for group in groups] == [0, 1, 2, 3]
    assert sorted(n for shard in shards for n in shard.sequence_ids) == list(range(8))
    assert not replaced


@pytest.mark.parametrize("method", ["take", "finished", "cut"])
def test_a_process_that_dies_is_replaced_and_changes_nothing(method: str) -> None:
    groups, shards, _ = _run()
    again, others, replaced = _run(method)
    assert replaced == ["collector 0"]
    assert [[one.seed for one in group.samples] for group in again] == [
        [one.seed for one in group.samples] for group in groups
    ]
    assert [group.rewards for group in again] == [group.rewards for group in groups]
    for shard, other in zip(shards, others, strict=True):
        assert shard.token_ids.tolist() == other.token_ids.tolist()
        assert shard.updates == other.updates
