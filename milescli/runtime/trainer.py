"""All trainer ranks as one Trainer: the same call on every rank, bounded and named. Lives in the
driver; the ranks are actors."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milescli.backends.ray.cluster import ActorHandle, Cluster
from milescli.backends.ray.group import run_all
from milescli.core.types import StepReport, WeightVersion
from milescli.train.base import TrainBatch
from milescli.weights.base import EngineAddress


@dataclass(slots=True)
class RankGroup:
    """Implements milescli.train.base.Trainer over the actors of the trainer ranks."""

    cluster: Cluster
    ranks: list[ActorHandle]
    step_timeout_s: float
    async_save: bool
    on_host: bool
    """The ranks run on a CPU: there is no device memory to give back."""

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await run_all(self.ranks, method, *args, timeout_s=self.step_timeout_s)

    async def connect_engines(self, engines: list[EngineAddress]) -> None:
        """Open the weight channel."""
        await self._all("connect_engines", engines)

    async def step(self, batch: TrainBatch, *, lr: float) -> StepReport:
        """See Trainer."""
        return (await self._all("step", self.cluster.put(batch), lr))[0]

    async def logprobs(self, batch: TrainBatch) -> list[array[float]]:
        """See Trainer."""
        return (await self._all("logprobs", self.cluster.put(batch)))[0]

    async def publish(self, version: WeightVersion) -> None:
        """See Trainer."""
        await self._all("publish", version)

    async def verify(self) -> None:
        """See Trainer."""
        await self._all("verify")

    async def reset_optimizer(self) -> None:
        """See Trainer."""
        await self._all("reset_optimizer")

    async def freeze_reference(self) -> None:
        """See Trainer."""
        await self._all("freeze_reference")

    async def shed(self) -> None:
        """See Trainer."""
        if not self.on_host:
            await self._all("shed")

    async def sleep(self) -> None:
        """See Trainer."""
        if not self.on_host:
            await self._all("sleep")

    async def wake(self) -> None:
        """See Trainer."""
        if not self.on_host:
            await self._all("wake")

    async def save(self, folder: Path) -> None:
        """See Trainer."""
        await self._all("save", str(folder), self.async_save)

    async def finish_save(self) -> None:
        """See Trainer."""
        await self._all("finish_save")

    async def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """See Trainer. `weights_only`: leave optimizer and RNG as they are."""
        await self._all("load", str(folder), weights_only)

    async def silence_layers(self, first: int) -> None:
        """Make layers `first` and beyond pass their input through; the weights are lost."""
        await self._all("silence_layers", first)

    async def close(self) -> None:
        """Leave process groups in order; errors do not matter any more."""
        await run_all(self.ranks, "close", timeout_s=30.0)
