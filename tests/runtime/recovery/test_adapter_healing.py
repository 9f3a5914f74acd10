"""Ranks in which adapters take turns die, and new ones have of each what it had learned."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from milescli.runtime.recovery.healing_trainer import Call, RecordedCalls
from tests.runtime.recovery.dying_ranks import Ranks, Rig, read, run


@dataclass(eq=False)
class TurnRanks(Ranks):
    """The weights are those of the one whose turn it is."""

    of_each: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    async def take_turn(self, adapter: str) -> None:
        self.weights = self.of_each[adapter]

    async def load(self, folder: Path, *, weights_only: bool = False) -> None:
        self.weights[:] = read(folder)


@dataclass
class TurnRig(Rig):
    """With a newest checkpoint of each."""

    newest_of: dict[str, Path] = field(default_factory=dict)

    async def restart(self) -> TurnRanks:
        self.ranks = TurnRanks()
        for name, folder in self.newest_of.items():
            await self.ranks.take_turn(name)
            await self.ranks.load(folder)
        return self.ranks


def test_each_is_done_again_from_its_own_checkpoint(tmp_path: Path) -> None:
    """One saved long ago, one is saving when they die, one never did."""
    rig = TurnRig(tmp_path, first=TurnRanks(dies_in={"step": 8}))

    async def work() -> None:
        a, b, c = (rig.trainer.of_adapter(name) for name in "abc")
        folders = {name: tmp_path / name for name in "ab"}
        for folder in folders.values():
            folder.mkdir()
        await a.step(1, lr=0.1)
        await b.step(2, lr=0.1)
        await a.save(folders["a"])
        await a.finish_save()
        rig.newest_of["a"] = folders["a"]
        a.note_saved()
        await c.step(3, lr=0.1)
        await a.step(4, lr=0.1)
        await b.step(5, lr=0.1)
        await b.save(folders["b"])
        await c.step(6, lr=0.1)
        await b.step(7, lr=0.1)
        await a.step(8, lr=0.1)  # in which they die
        await b.finish_save()
        b.note_saved()
        assert read(folders["b"]) == [2, 5], "as it was when it was saved"

    run(rig, work)
    assert dict(rig.ranks.of_each) == {"a": [1, 4, 8], "b": [2, 5, 7], "c": [3, 6]}


def test_what_one_lost_is_not_lost_by_another() -> None:
    kept = RecordedCalls(limit_bytes=1e9)
    for adapter in "aabb":
        kept.add(Call("step", adapter=adapter))
    kept.drop_before(3)  # too much: the first of `b` goes, too
    assert not kept.has_since_checkpoints
    kept.set_saved(4, "a")
    assert not kept.has_since_checkpoints, "of `b` a step is gone"
    kept.set_saved(4, "b")
    assert kept.has_since_checkpoints and kept.since_checkpoints == []
    kept.add(Call("step", adapter="a"))
    assert [number for number, _ in kept.since_checkpoints] == [4]


def test_calls_of_one_are_made_in_its_turn(tmp_path: Path) -> None:
    """Also where two are asked at the same moment."""
    rig = TurnRig(tmp_path, first=TurnRanks())

    async def work() -> None:
        trainers = [rig.trainer.of_adapter(name) for name in "ab"]
        await asyncio.gather(*(one.step(n, lr=0.1) for n in range(6) for one in trainers))

    run(rig, work)
    assert dict(rig.ranks.of_each) == {"a": [*range(6)], "b": [*range(6)]}
