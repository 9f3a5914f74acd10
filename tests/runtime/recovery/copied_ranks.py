"""Ranks as `dying_ranks` has them, whose weights are copied to a keeper in this process: bytes go
the way that they go between real ones, but for Ray."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from milescli.core.errors import WorkerDied
from milescli.runtime.recovery.copy_keeper import CopyKeeper
from milescli.runtime.recovery.healing_trainer import HealingTrainer
from milescli.runtime.recovery.peer_copies import Copies
from milescli.runtime.recovery.restarts import Repairs, Restarts
from tests.runtime.recovery.dying_ranks import Ranks, Rig

NUM_RANKS = 2


@dataclass(eq=False)
class Process:
    """Stands for an ActorHandle: holds an object, until it dies."""

    name: str
    held: Any
    is_dead: bool = False
    log_path: Path = Path("none.log")
    dies_in: str = ""
    """Method."""
    slow: asyncio.Event | None = None
    """What `write` waits for."""

    def hand_over(self, method: str, *args: Any) -> Any:
        return getattr(self.held, method)(*args)

    async def look(self) -> None:
        if self.is_dead:
            raise WorkerDied(f"{self.name} died", why="planted", fix="none")

    async def run(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        if method == "write" and self.slow is not None:
            await self.slow.wait()
        self.is_dead |= method == self.dies_in
        await self.look()
        return getattr(self.held, method)(*args, **kwargs)


@dataclass(eq=False)
class Memory:
    """Of one rank: its copy."""

    copy: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))

    def read_copy(self, section: int, offset: int, size_bytes: int) -> np.ndarray:
        return self.copy[offset : offset + size_bytes]

    def write_copy(self, section: int, offset: int, part: np.ndarray) -> None:
        self.copy[offset : offset + part.size] = part


@dataclass(eq=False)
class CopiedRanks(Ranks):
    """Both ranks hold the whole."""

    slow: asyncio.Event | None = None
    """What `take_copy` waits for."""
    memories: list[Memory] = field(default_factory=lambda: [Memory() for _ in range(NUM_RANKS)])

    @property
    def ranks(self) -> list[Any]:
        return [Process(f"trainer rank {n}", held) for n, held in enumerate(self.memories)]

    async def take_copy(self) -> list[list[int]]:
        self._called("take_copy")
        if self.slow is not None:
            await self.slow.wait()
        for memory in self.memories:
            memory.copy = np.array(self.weights, dtype=np.int64).view(np.uint8)
        return [[memory.copy.size] for memory in self.memories]

    async def expect_copy(self, sizes: list[list[int]]) -> None:
        for memory, (size,) in zip(self.memories, sizes, strict=True):
            memory.copy = np.zeros(size, dtype=np.uint8)

    async def take_over(self) -> None:
        self._called("take_over")
        first, second = (memory.copy.view(np.int64).tolist() for memory in self.memories)
        assert first == second
        self.weights = first


@dataclass(eq=False)
class Keepers:
    """Stands for their RankGroup."""

    ranks: list[Process]
    step_timeout_s: float = 5.0

    async def find_dead(self, *, within_s: float = 0.0) -> WorkerDied | None:
        dead = next((keeper for keeper in self.ranks if keeper.is_dead), None)
        return WorkerDied(f"{dead.name} died", why="planted", fix="none") if dead else None

    async def look(self) -> list[None]:
        if (died := await self.find_dead()) is not None:
            raise died
        return [None for _ in self.ranks]

    async def kill(self) -> None:
        for keeper in self.ranks:
            keeper.is_dead = True


@dataclass
class CopiedRig(Rig):
    """A trainer whose ranks' state is copied after each step."""

    first: CopiedRanks = field(default_factory=CopiedRanks)
    every: int = 1
    slow_start: asyncio.Event | None = None
    """What further keepers wait for."""
    keepers: list[Keepers] = field(default_factory=list)
    """All that were started; the last one is there."""
    bare: int = 0
    """How often ranks were started for a copy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        repairs = Repairs(
            bus=self.trainer._repairs.bus,
            restarts=Restarts(limits=self.limits),
            step=lambda: len(self.ranks.weights),
        )
        self.copies = Copies(
            every=self.every,
            start_keepers=self.start_keepers,  # type: ignore[arg-type]
            start_ranks=self.start_bare,  # type: ignore[arg-type]
            keeper_of_rank=[1, 0],
            repairs=repairs,
            silence_s=30.0,
        )
        self.trainer = HealingTrainer(
            self.first,  # type: ignore[arg-type]
            restart=self.restart,  # type: ignore[arg-type]
            repairs=repairs,
            silence_s=30.0,
            copies=self.copies,
        )

    async def start_keepers(self) -> Keepers:
        if self.slow_start is not None:
            await self.slow_start.wait()
        processes = [Process(f"copy keeper {n}", CopyKeeper()) for n in range(NUM_RANKS)]
        self.keepers.append(Keepers(processes))
        return self.keepers[-1]

    async def restart(self) -> Ranks:
        self.then = self.then or [CopiedRanks()]
        return await super().restart()

    async def start_bare(self) -> Ranks:
        self.bare += 1
        self.ranks = self.then.pop(0) if self.then else CopiedRanks()
        return self.ranks

    async def begin(self) -> None:
        self.copies.start()
        await self.settle()

    async def settle(self) -> None:
        """What goes on beside the steps gets time to end."""
        for _ in range(60):
            await asyncio.sleep(0)

    async def steps(self, *batches: int) -> None:
        """With time for each copy to arrive."""
        for batch in batches:
            await self.step(batch)
            await self.settle()

    @property
    def sources(self) -> list[str]:
        return [event.source for event in self.events if hasattr(event, "source")]  # type: ignore[attr-defined]
