"""Ranks that die, as stand-ins that keep a number, and the trainer that replaces them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from milescli.core.errors import WaitTimeout, WorkerDied
from milescli.core.events import EventBus
from milescli.recipe.machine import Fault
from milescli.runtime.recovery.healing_trainer import HealingTrainer
from milescli.runtime.recovery.rank_group import Hang
from milescli.runtime.recovery.restarts import Repairs, Restarts


@dataclass(eq=False)
class Ranks:
    """Their weights are the batches that they were given, one after the other."""

    weights: list[int] = field(default_factory=list)
    dies_in: dict[str, int] = field(default_factory=dict)
    """Method -> in which call of it."""
    pending: tuple[Path, list[int]] | None = None
    """A folder, and what is being written there."""
    fleets: set[str] = field(default_factory=set)
    is_dead: bool = False
    hangs: str | None = None
    """Why the second rank seems to hang."""
    published: list[list[int]] = field(default_factory=list)
    postures: list[str] = field(default_factory=list)
    traced: list[int] = field(default_factory=list)

    def _called(self, method: str) -> None:
        left = self.dies_in.get(method)
        if left is not None:
            self.dies_in[method] = left - 1
            self.is_dead |= left == 1
        if self.is_dead:
            raise WaitTimeout("a rank lost the others", why="planted", fix="none")

    async def find_dead(self, *, within_s: float = 0.0) -> WorkerDied | None:
        died = WorkerDied("trainer rank 1 died", why="planted", fix="none")
        return died if self.is_dead else None

    async def look(self) -> list[Hang | None]:
        if (died := await self.find_dead()) is not None:
            raise died
        return [None, Hang(self.hangs, is_sure=True) if self.hangs else None]

    @property
    def ranks(self) -> list[object]:
        return [SimpleNamespace(name=f"trainer rank {n}", log_path=None) for n in (0, 1)]

    def dump_stacks(self) -> str:
        return "trainer.stacks.txt"

    async def kill(self) -> None:
        self.is_dead = True

    async def call(self, method: str, *args: object, **kwargs: object) -> object:
        return await getattr(self, method)(*args, **kwargs)

    async def step(self, batch: int, **rates: float) -> str:
        self._called("step")
        self.weights.append(batch)
        return f"report of {batch}"

    async def start_profile(
        self, ranks: list[int], folder: str, with_memory: bool
    ) -> dict[int, str | None]:
        self._called("start_profile")
        self.traced = [rank for rank in ranks if rank < 2]
        return dict.fromkeys(self.traced)

    async def stop_profile(self, ranks: list[int]) -> dict[int, dict[str, object]]:
        self._called("stop_profile")
        told = {"file": "rank_0.json.gz", "seconds": 1.0} if self.traced else {"error": "replaced"}
        return {rank: dict(told) for rank in ranks if rank < 2}

    async def save(self, folder: Path) -> None:
        (folder / "torn").write_text("half")
        self._called("save")
        self.pending = folder, list(self.weights)

    async def finish_save(self) -> None:
        self._called("finish_save")
        if self.pending is not None:
            folder, weights = self.pending
            (folder / "torn").unlink()
            (folder / "weights").write_text(" ".join(map(str, weights)))
            self.pending = None

    async def connect_engines(self, engines: list[str], fleet: str) -> None:
        self.fleets.add(fleet)

    async def publish(self, version: int, fleet: str) -> None:
        self._called("publish")
        assert fleet in self.fleets, "no channel is open"
        self.published.append(list(self.weights))

    async def offload_optimizer_state(self) -> None:
        self._memory_state("offload_optimizer_state")

    async def sleep(self) -> None:
        self._memory_state("sleep")

    async def wake(self) -> None:
        self._memory_state("wake")

    async def is_written(self) -> bool:
        self._called("is_written")
        return True

    def _memory_state(self, which: str) -> None:
        self._called(which)
        self.postures.append(which)

    async def load(self, folder: Path, *, weights_only: bool = False) -> None:
        self.weights = read(folder)

    async def free_teachers(self) -> None:
        self.weights.append(-1)


def read(folder: Path) -> list[int]:
    return [int(word) for word in (folder / "weights").read_text().split()]


@dataclass
class Rig:
    """A trainer, and its checkpoints."""

    folder: Path
    first: Ranks = field(default_factory=Ranks)
    then: list[Ranks] = field(default_factory=list)
    """Those that are started in its place, in order; beyond them, healthy ones."""
    limits: Fault = field(default_factory=Fault)
    newest: Path | None = None
    room: Callable[[], AbstractAsyncContextManager[None]] | None = None
    events: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = self.first
        self.trainer = HealingTrainer(
            self.first,  # type: ignore[arg-type]
            restart=self.restart,  # type: ignore[arg-type]
            repairs=Repairs(
                bus=EventBus([self.events.append]),
                restarts=Restarts(limits=self.limits),
                step=lambda: len(self.ranks.weights),
            ),
            silence_s=30.0,
            free_devices=self.room,
        )

    async def restart(self) -> Ranks:
        self.ranks = self.then.pop(0) if self.then else Ranks()
        if self.newest is not None:
            await self.ranks.load(self.newest)
        return self.ranks

    async def begin_save(self, step: int) -> Path:
        folder = self.folder / f"step_{step}"
        folder.mkdir()
        await self.trainer.save(folder)
        return folder

    async def end_save(self, folder: Path) -> None:
        await self.trainer.finish_save()
        self.newest = folder
        self.trainer.note_saved()

    async def step(self, *batches: int) -> list[str]:
        return [await self.trainer.step(batch, lr=0.1) for batch in batches]  # type: ignore[arg-type,misc]

    @property
    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]


def run(rig: Rig, work: Callable[[], object]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]
