"""The calls of a trainer as calls that may have to be made again. Who makes them is said by whoever
inherits: `healing_trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from milescli.core.errors import CheckpointError
from milescli.core.types import ROLLOUT, EngineAddress, StepReport, WeightVersion
from milescli.runtime.kept_calls import Call
from milescli.train.base import Stepped, TrainBatch


class Asking:
    """Implements milescli.train.base.Trainer."""

    adapter: str | None = None
    """Whose calls they are; None: the ranks train one policy."""

    async def ask(self, call: Call, *, changes: bool = False) -> Any:
        """Make it, of ranks that live. `changes`: the ranks are others afterwards."""
        raise NotImplementedError

    def note(self, call: Call) -> None:
        """It was made, and new ranks must be as it left the old ones: a posture, open channels, a
        save that goes on."""
        raise NotImplementedError

    async def is_written_of(self, adapter: str | None) -> bool:
        """As `is_written`."""
        raise NotImplementedError

    def failed_save(self, adapter: str | None) -> CheckpointError | None:
        """Why new ranks could not write what the dead ones had begun to."""
        raise NotImplementedError

    def _call(self, method: str, *args: Any, fleet: str | None = None, **kwargs: Any) -> Call:
        return Call(method, args, kwargs, fleet=fleet, adapter=self.adapter)

    async def _noted(self, method: str, *args: Any) -> None:
        call = self._call(method, *args)
        await self.ask(call)
        self.note(call)

    async def _changed(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self.ask(self._call(method, *args, **kwargs), changes=True)

    async def connect_engines(self, engines: list[EngineAddress], fleet: str = ROLLOUT) -> None:
        """See Trainer."""
        await self._noted("connect_engines", engines, fleet)

    async def step(
        self, batch: TrainBatch, *, lr: float | None, critic_lr: float | None = None
    ) -> Stepped:
        """See Trainer."""
        return await self._changed("step", batch, lr=lr, critic_lr=critic_lr)

    async def start_critic(self) -> None:
        """See Trainer."""
        await self._changed("start_critic")

    async def measure(self, batch: TrainBatch) -> StepReport:
        """See Trainer."""
        return await self.ask(self._call("measure", batch))

    async def score(
        self, batch: TrainBatch, *, rounded_otherwise: bool = False
    ) -> list[np.ndarray]:
        """See Trainer."""
        return await self.ask(self._call("score", batch, rounded_otherwise=rounded_otherwise))

    async def ask_teachers(self, batch: TrainBatch) -> list[tuple[np.ndarray, np.ndarray]]:
        """See Trainer."""
        return await self.ask(self._call("ask_teachers", batch))

    async def dismiss_teachers(self) -> None:
        """See Trainer."""
        await self._noted("dismiss_teachers")

    async def publish(self, version: WeightVersion, fleet: str = ROLLOUT) -> None:
        """See Trainer."""
        await self.ask(self._call("publish", version, fleet, fleet=fleet))

    async def verify(self, fleet: str = ROLLOUT) -> None:
        """See Trainer."""
        await self.ask(self._call("verify", fleet, fleet=fleet))

    async def reset_optimizer(self) -> None:
        """See Trainer."""
        await self._changed("reset_optimizer")

    async def freeze_reference(self) -> None:
        """See Trainer."""
        await self._changed("freeze_reference")

    async def silence_layers(self, first: int) -> None:
        """See Trainer."""
        await self.ask(self._call("silence_layers", first))

    async def shed(self) -> None:
        """See Trainer."""
        await self._noted("shed")

    async def sleep(self) -> None:
        """See Trainer."""
        await self._noted("sleep")

    async def wake(self) -> None:
        """See Trainer."""
        await self._noted("wake")

    async def save(self, folder: Path) -> None:
        """See Trainer."""
        await self._noted("save", folder)

    async def is_written(self) -> bool:
        """See Trainer."""
        return await self.is_written_of(self.adapter)

    async def finish_save(self) -> dict[str, str]:
        """See Trainer."""
        sha256 = await self.ask(self._call("finish_save"))
        if (failed := self.failed_save(self.adapter)) is not None:
            raise failed
        return sha256

    async def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """See Trainer."""
        await self._changed("load", folder, weights_only=weights_only)
