"""Who holds the devices, and how weights change hands: taking turns (colocated) or side by side
(split). The loop does not know which."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from milescli.core.types import ROLLOUT, WeightVersion
from milescli.rollout.base import RolloutEngine
from milescli.train.base import Trainer


@dataclass(slots=True)
class Devices:
    """The turns of trainer and engines, and the one owner of a publish. Engines answer except
    inside `training` and `publish`."""

    taking_turns: bool
    """They share device memory: colocated, but not on a CPU, where nobody gives memory back."""
    trainer: Trainer
    engines: RolloutEngine
    version: WeightVersion = field(default_factory=lambda: WeightVersion(0))
    """What the engines hold."""
    engines_asleep: bool = False
    """They gave their memory back, and wait for a publish."""
    fleet: str = ROLLOUT
    """As the trainer knows the engines."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer may use its devices; engines that take turns with it have given their memory
        back and stay asleep until `publish`."""
        if self.taking_turns and not self.engines_asleep:
            await self.engines.sleep()
            self.engines_asleep = True
            await self.trainer.wake()
        yield

    async def publish(self, version: WeightVersion, *, verify: bool = False) -> None:
        """The engines hold the trainer's weights as `version`, and answer again, also those that
        were in the middle. The trainer is awake, as after `training`; where they take turns, it
        sleeps afterwards. The engines' caches are flushed once and the version is said once, by
        `resume`.

        `verify`: raises MismatchError where they then hold anything else; nobody may ask the
        engines meanwhile.
        """
        await self.engines.pause()
        if self.engines_asleep:
            await self.trainer.shed()
            await self.engines.wake_weights()
        await self.trainer.publish(version, self.fleet)
        if verify:
            await self.trainer.verify(self.fleet)
        if self.engines_asleep:
            await self.trainer.sleep()
            await self.engines.wake_cache()
            self.engines_asleep = False
        self.version = version
        await self.engines.resume(version)
