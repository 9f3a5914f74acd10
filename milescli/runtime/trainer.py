"""All trainer ranks as one Trainer: the same call on every rank, bounded and named. Lives in the
driver; the ranks are actors."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from milescli.backends.ray.actor import ActorHandle
from milescli.backends.ray.cluster import Cluster
from milescli.backends.ray.group import run_all, run_each
from milescli.core.errors import WorkerDied
from milescli.core.run_processes import CpuClock, cpu_seconds
from milescli.core.silence import dump_stacks, is_stopped_process
from milescli.core.types import ROLLOUT, EngineAddress, StepReport, WeightVersion
from milescli.plan.types import TrainerLayout
from milescli.train.base import Stepped, TrainBatch

CHECK_EVERY_S = 0.2
TRACE_TIMEOUT_S = 600.0
"""For a rank to write a trace of many events."""
DEATH_GRACE_S = 5.0
"""A process's death is the cause of what others say; so long it is looked for."""


@dataclass(frozen=True, slots=True)
class Hang:
    """What was seen of a rank that does not speak."""

    why: str
    is_sure: bool
    """It cannot be busy."""


@dataclass(slots=True)
class RankGroup:
    """Implements milescli.train.base.Trainer over the actors of the trainer ranks."""

    cluster: Cluster
    ranks: list[ActorHandle]
    pids: list[int]
    """[ranks] on the node of each."""
    layout: TrainerLayout
    step_timeout_s: float
    async_save: bool
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """All ranks are asked the same in the same order, as they wait for each other."""
    _clocks: defaultdict[int, CpuClock] = field(default_factory=lambda: defaultdict(CpuClock))
    """By process id."""

    async def look(self) -> list[Hang | None]:
        """[ranks] why it seems to hang; None: it speaks. Raises WorkerDied where one has ended."""
        looks = await asyncio.gather(*(rank.look() for rank in self.ranks), return_exceptions=True)
        for died in looks:
            if isinstance(died, BaseException):
                raise died
        pairs = zip(self.ranks, self.pids, looks, strict=True)
        return [self._hang(rank, pid, does_speak=look is not None) for rank, pid, look in pairs]

    def _hang(self, rank: ActorHandle, pid: int, *, does_speak: bool) -> Hang | None:
        """On the driver's computer one that computes is slow, and not hung: how long that may take
        is for who asked it."""
        is_here = rank.node.is_driver
        is_busy = is_here and self._clocks[pid].is_busy(cpu_seconds(pid))
        if does_speak or is_busy:
            return None
        if is_here and is_stopped_process(pid):
            return Hang(f"its process {pid} is stopped (SIGSTOP)", is_sure=True)
        return Hang("it does not answer", is_sure=False)

    async def find_dead(self, *, within_s: float = 0.0) -> WorkerDied | None:
        """The error for a rank whose process has ended, looked for until one has or the time is
        over. A busy rank is not dead, and nor is one that hangs."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                await self.look()
            except WorkerDied as error:
                return error
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(CHECK_EVERY_S)

    def dump_stacks(self) -> str | None:
        """Write where the ranks of this computer are, beside their logs; the file. Blocks."""
        here = {
            rank.name: pid
            for rank, pid in zip(self.ranks, self.pids, strict=True)
            if rank.node.is_driver
        }
        return dump_stacks(here, self.ranks[0].log_path.with_name("trainer.stacks.txt"))

    async def kill(self) -> None:
        """End all ranks at once."""
        await self.cluster.kill(self.ranks)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        async with self._turn:
            return await run_all(self.ranks, method, *args, timeout_s=self.step_timeout_s)

    async def take_turn(self, adapter: str) -> None:
        """What follows is of this one of several adapters."""
        await self._all("take_turn", adapter)

    async def connect_engines(self, engines: list[EngineAddress], fleet: str = ROLLOUT) -> None:
        """See Trainer."""
        await self._all("connect_engines", engines, fleet)

    async def step(
        self, batch: TrainBatch, *, lr: float | None, critic_lr: float | None = None
    ) -> Stepped:
        """See Trainer."""
        of_ranks = await self._sharded("step_and_tell", batch, lr, critic_lr)
        told = {number: own for each in of_ranks for number, own in each.logprobs.items()}
        memory = tuple(seen for each in of_ranks for seen in each.memory)
        return Stepped(report=of_ranks[0].report, logprobs=told, memory=memory)

    async def start_profile(
        self, ranks: Sequence[int], folder: str, with_memory: bool
    ) -> dict[int, str | None]:
        """Of these ranks, those that there are begin a trace: why one does not."""
        return await self._some(ranks, "start_profile", folder, with_memory)

    async def stop_profile(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """They end it, and write it into that folder."""
        return await self._some(ranks, "stop_profile")

    async def _some(self, ranks: Sequence[int], method: str, *args: Any) -> dict[int, Any]:
        there = [rank for rank in ranks if 0 <= rank < len(self.ranks)]
        timeout_s = max(self.step_timeout_s, TRACE_TIMEOUT_S)
        async with self._turn:
            own = [self.ranks[rank] for rank in there]
            told = await run_all(own, method, *args, timeout_s=timeout_s)
        return dict(zip(there, told, strict=True))

    async def start_critic(self) -> None:
        """See Trainer."""
        await self._all("start_critic")

    async def measure(self, batch: TrainBatch) -> StepReport:
        """See Trainer."""
        return (await self._sharded("measure", batch))[0]

    async def score(
        self, batch: TrainBatch, *, rounded_otherwise: bool = False
    ) -> list[np.ndarray]:
        """See Trainer."""
        otherwise = [True] * rounded_otherwise  # ranks that hold a reward model have no such choice
        return self._whole(batch, await self._sharded("score", batch, *otherwise))

    async def ask_teachers(self, batch: TrainBatch) -> list[tuple[np.ndarray, np.ndarray]]:
        """See Trainer."""
        return self._whole(batch, await self._sharded("ask_teachers", batch))

    async def dismiss_teachers(self) -> None:
        """See Trainer."""
        await self._all("dismiss_teachers")

    def _whole(self, batch: TrainBatch, results: list[Any]) -> list[Any]:
        """What ranks say of the sequences of their shards, sequence by sequence."""
        whole: list[Any] = [None] * batch.num_sequences
        for rank, sequences in enumerate(results):
            if sequences is not None:
                shard = batch.shards[self.layout.dp_rank(rank)]
                for number, values in zip(shard.sequence_ids, sequences, strict=True):
                    whole[number] = values
        assert all(values is not None for values in whole), "a sequence was not scored"
        return whole

    async def _sharded(self, method: str, batch: TrainBatch, *args: Any) -> list[Any]:
        """Every rank gets the shard of its data-parallel rank, which is put into shared memory
        once."""
        shards = [await self.cluster.put(shard) for shard in batch.shards]
        arguments = [(shards[self.layout.dp_rank(rank)], *args) for rank in range(len(self.ranks))]
        async with self._turn:
            return await run_each(self.ranks, method, arguments, timeout_s=self.step_timeout_s)

    async def publish(self, version: WeightVersion, fleet: str = ROLLOUT) -> None:
        """See Trainer."""
        await self._all("publish", version, fleet)

    async def verify(self, fleet: str = ROLLOUT) -> None:
        """See Trainer."""
        await self._all("verify", fleet)

    async def reset_optimizer(self) -> None:
        """See Trainer."""
        await self._all("reset_optimizer")

    async def freeze_reference(self) -> None:
        """See Trainer."""
        await self._all("freeze_reference")

    async def shed(self) -> None:
        """See Trainer."""
        await self._all("shed")

    async def sleep(self) -> None:
        """See Trainer."""
        await self._all("sleep")

    async def wake(self) -> None:
        """See Trainer."""
        await self._all("wake")

    async def save(self, folder: Path) -> None:
        """See Trainer."""
        await self._all("save", str(folder), self.async_save)

    async def is_written(self) -> bool:
        """See Trainer."""
        return all(await self._all("is_written"))

    async def finish_save(self) -> dict[str, str]:
        """See Trainer."""
        return (await self._all("finish_save"))[0]

    async def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """See Trainer."""
        await self._all("load", str(folder), weights_only)

    async def take_copy(self) -> list[list[int]]:
        """Each rank copies its state to its host memory. [ranks][sections] bytes."""
        return await self._all("take_copy")

    async def expect_copy(self, sizes: Sequence[list[int]]) -> None:
        """Each rank makes room for a copy of `sizes`, as `take_copy` returned them."""
        arguments = [(own,) for own in sizes]
        async with self._turn:
            await run_each(self.ranks, "expect_copy", arguments, timeout_s=self.step_timeout_s)

    async def take_over(self) -> None:
        """The ranks go on from the copy that was written to them."""
        await self._all("take_over")

    async def silence_layers(self, first: int) -> None:
        """See Trainer."""
        await self._all("silence_layers", first)
