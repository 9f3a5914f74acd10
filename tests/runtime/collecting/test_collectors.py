"""Processes that collect, in memory, so that one dies on demand: what the driver asks for it gets,
in the order of the prompts, also of a successor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milescli.core.errors import WorkerDied
from milescli.core.events import EventBus, WorkerReplaced
from milescli.core.imports import Origin
from milescli.core.types import EngineAddress, Group, Image, ImageSpan, Prompt, WeightVersion
from milescli.data.file_prompts import FilePrompts
from milescli.recipe.schema import Recipe
from milescli.rollout.base import RolloutEngine
from milescli.rollout.collect.collector import Collector
from milescli.rollout.episode.episode import training_episodes
from milescli.runtime.collecting.collectors import Collectors
from milescli.runtime.collecting.process import CollectorProcess, JournalPart
from milescli.runtime.collecting.share import Share
from milescli.runtime.inputs.episode_parts import scorer_of
from milescli.runtime.recording.sample_journal import Identity, SampleJournal
from milescli.runtime.recovery.restarts import Repairs, Restarts
from milescli.train.objectives import load_objective
from milescli.train.objectives.policy import Policy
from milescli.train.packing import images_of, pack
from tests.rollout.engines import ScriptedEngine, decode, make_episodes, make_source
from tests.waiting import until_async

ENGINES = tuple(EngineAddress(url=f"http://127.0.0.1:{n}", name=f"engine {n}") for n in (8, 9))
RECIPE = Recipe.model_validate(
    {
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2},
        "train": {"objective": "policy"},
    }
)
LAYOUT: dict[str, Any] = {"objective": "policy", "dp": 2, "max_tokens_per_microbatch": 8}


class _Tokenizer:
    """Has what a process needs of one."""

    decode_response = staticmethod(decode)


class _Process(CollectorProcess):
    """Asks a scripted engine, which has these weights."""

    weights = WeightVersion(0)

    @property
    def engine(self) -> RolloutEngine:
        engine = ScriptedEngine()
        engine.version = self.weights
        return engine


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
    closed = frozenset[str]()
    version = WeightVersion(0)


async def _nothing(_: object) -> None:
    """End no process."""


class _Rig:
    """Two processes; the first that is started dies in that method, and its successor's engine has
    other weights. With a folder, they keep a journal there."""

    def __init__(
        self,
        *,
        dies_in: str | None = None,
        later: int = 0,
        folder: Path | None = None,
        source: Callable[[], FilePrompts] = make_source,
    ) -> None:
        rollout = RECIPE.rollout.model_copy(update={"reward": "length", "max_staleness": 1})
        self.recipe = RECIPE.model_copy(update={"rollout": rollout})
        self.dies_in, self.later, self.source = dies_in, WeightVersion(later), source
        self.handles, self.replaced = list[_Handle](), list[WorkerReplaced]()
        self.bus = EventBus([self._heard])
        self.journal = None if folder is None else self._journal(folder)

    def _heard(self, event: object) -> None:
        if isinstance(event, WorkerReplaced):
            self.replaced.append(event)

    def _journal(self, folder: Path) -> SampleJournal:
        return SampleJournal(
            folder,
            identity=Identity(past="p", line="l"),
            bound_bytes=1e9,
            max_staleness=1,
            oldest_kept=lambda: None,
            warn=print,
        )

    async def _start(self, number: int, engines: list[EngineAddress]) -> Any:
        part, journal = None, self.journal
        if journal is not None:
            folder = journal.part(f"collector-{number}")
            part = JournalPart(folder=folder, identity=journal.identity, bound_bytes=1e9)
        is_second = len(self.handles) > 1
        kind = type("_Later", (_Process,), {"weights": self.later}) if is_second else _Process
        process = kind(
            name=f"collector {number}",
            recipe=self.recipe,
            share=Share(count=2, on_node=1, other_nodes=()),
            origin=Origin.here(),
            cluster=None,
            tokenizer=_Tokenizer(),
            vocab_size=16,
            fleet={"engines": engines},
            policies={},
            version=WeightVersion(0),
            is_paused=False,
            with_greedy=False,
            journal=part,
        )
        self.handles.append(_Handle(process, None if self.handles else self.dies_in))
        return self.handles[-1]

    async def collected(self, between: Callable[[list[Group]], Any] | None = None) -> Any:
        """(groups of a step, its shards)."""
        collectors = Collectors(
            self._start,
            _nothing,
            count=2,
            recipe=self.recipe,
            fleet=_Fleet(),  # type: ignore[arg-type]
            journal=self.journal,
            repairs=Repairs(bus=self.bus, restarts=Restarts(limits=self.recipe.fault)),
            warn=print,
        )
        await collectors.open()
        episodes = make_episodes(ScriptedEngine())
        collector = Collector(self.source(), episodes, recipe=self.recipe, group_sampler=collectors)
        try:
            groups = await collector.take(1, version=WeightVersion(0))
            if between is not None:
                await between(groups)
            policy = load_objective("policy", self.recipe)
            assert isinstance(policy, Policy)
            batch = await collectors.batch(groups, policy, **LAYOUT)
            shards = [shard.whole(shard.pieces) for shard in batch.shards]  # type: ignore[union-attr]
            (whole,) = await collectors.whole(groups[:1])
            line = whole.samples[0].trajectories[0]
            assert line.num_tokens == len(groups[0].prompt.token_ids) + 1
            return groups, shards
        finally:
            await collectors.close()

    def run(self, between: Callable[[list[Group]], Any] | None = None) -> Any:
        """The same, within a bound."""
        return asyncio.run(asyncio.wait_for(self.collected(between), 120.0))


def _pictures() -> FilePrompts:
    """Prompts that show one of two pictures, or both."""
    drawn = [
        Image(sha256=name, png=name.encode(), width=2, height=2, grid=(1, 2, 2), num_tokens=2)
        for name in ("red", "blue")
    ]
    prompts = []
    for index in range(8):
        images = (drawn[:1], drawn[1:], drawn)[index % 3]
        spans = [
            ImageSpan(start=2 * place, num_tokens=2, grid=one.grid, sha256=one.sha256)
            for place, one in enumerate(images)
        ]
        ids = [9] * 2 * len(images) + [index]
        prompts.append(
            Prompt(index=index, token_ids=ids, text="", images=images, image_spans=spans)
        )
    return FilePrompts(prompts, seed=0, shuffle=False)


@pytest.mark.parametrize("source", [make_source, _pictures])
def test_a_batch_is_that_of_a_run_without_processes(source: Callable[[], FilePrompts]) -> None:
    rig = _Rig(source=source)
    groups, shards = rig.run()
    episodes = training_episodes(
        rig.recipe,
        engine=ScriptedEngine(),
        scorer=scorer_of(rig.recipe, None),
        decode=decode,
        vocab_size=16,
    )
    alone = Collector(source(), episodes, recipe=rig.recipe)
    items = asyncio.run(alone.take(1, version=WeightVersion(0)))
    policy = load_objective("policy", rig.recipe)
    expected = pack(policy.sequences(items), images=images_of(items), **LAYOUT)
    assert [group.rewards for group in groups] == [group.rewards for group in items]
    for shard, other in zip(shards, expected.shards, strict=True):
        np.testing.assert_equal(
            [getattr(shard, name) for name in shard.__slots__],
            [getattr(other, name) for name in shard.__slots__],
        )
    assert bool(shards[0].images) is (source is _pictures)


def test_a_process_that_starts_while_weights_are_sent_hears_when_they_are() -> None:
    fleet, calls = _Fleet(), list[tuple[Any, ...]]()
    fleet.is_paused = True

    class Handle:
        async def run(self, method: str, *args: Any, timeout_s: float) -> Any:
            calls.append((method, *args))
            if method == "pause":  # meanwhile
                fleet.is_paused, fleet.version = False, WeightVersion(1)
            await asyncio.sleep(3600 if method == "report" else 0)

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
    groups, shards = (rig := _Rig()).run()
    assert [group.prompt.index for group in groups] == [0, 1, 2, 3]
    assert sorted(n for shard in shards for n in shard.sequence_ids) == list(range(8))
    assert not rig.replaced


@pytest.mark.parametrize("method", ["take", "report", "make_pieces"])
def test_a_process_that_dies_is_replaced_and_changes_nothing(method: str) -> None:
    groups, shards = _Rig().run()
    again, others = (rig := _Rig(dies_in=method)).run()
    assert [event.worker for event in rig.replaced] == ["collector 0"]
    assert [[one.seed for one in group.samples] for group in again] == [
        [one.seed for one in group.samples] for group in groups
    ]
    assert [group.rewards for group in again] == [group.rewards for group in groups]
    for shard, other in zip(shards, others, strict=True):
        assert shard.token_ids.tolist() == other.token_ids.tolist()
        assert shard.updates == other.updates


def _versions(groups: list[Group]) -> set[int]:
    lines = [line for group in groups for one in group.samples for line in one.trajectories]
    return {span.version for line in lines for span in line.version_spans}


def test_what_a_process_counted_outlives_it_in_its_journal(tmp_path: Path) -> None:
    groups, _ = (rig := _Rig(dies_in="make_pieces", later=1, folder=tmp_path)).run()
    (event,) = rig.replaced
    assert (event.lost_samples, event.source) == (0, "4 samples from its journal")
    assert _versions(groups) == {0}, "they are read, not sampled again by newer weights"


def test_samples_that_no_journal_has_are_counted_and_others_take_their_place() -> None:
    rig = _Rig(later=1)

    async def die(groups: list[Group]) -> None:
        assert _versions(groups) == {0}
        rig.handles[0].death.set_result(None)
        await until_async(lambda: _versions(groups) == {0, 1})

    groups, _ = rig.run(die)
    (event,) = rig.replaced
    assert event.lost_samples == 4 and event.source.startswith("4 complete samples lost")
    assert _versions(groups) == {0, 1}


def test_a_step_does_not_learn_from_other_samples_than_it_took() -> None:
    with pytest.raises(WorkerDied, match="the samples of 2 groups were lost"):
        _Rig(dies_in="make_pieces", later=1).run()


def test_records_that_cannot_be_read_are_used_by_no_process(tmp_path: Path) -> None:
    rig = _Rig(folder=tmp_path)
    before, _ = rig.run()
    journal = rig.journal
    assert journal is not None
    journal.close()
    for number in range(2):
        journal.read_part(f"collector-{number}")
    broken = next(iter((tmp_path / "collector-0").iterdir()))
    broken.write_bytes(broken.read_bytes()[:-1] + b"!")
    again, _ = rig.run()
    assert [group.rewards for group in again] == [group.rewards for group in before]
    assert journal.distrust() == 0, "nothing is left that could be used"
