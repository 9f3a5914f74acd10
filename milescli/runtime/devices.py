"""Decides who uses the devices, and how weights reach the engines: trainer and engines take turns
(colocated) or run side by side (split). The loop does not know which."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from milescli.core.errors import WorkerDied
from milescli.core.events import PublishStats
from milescli.core.types import EVALUATION, JOINING, ROLLOUT, EngineAddress, WeightVersion
from milescli.core.units import decimal_product
from milescli.rollout.base import RolloutEngine
from milescli.train.base import Trainer


@dataclass(slots=True)
class Devices:
    """Gives the devices to trainer and engines in turn, and publishes weights. Engines answer
    except inside `training` and `publish`."""

    shares_memory: bool
    """True if they share device memory: colocated, but not on a CPU, where none is released."""
    trainer: Trainer
    engines: RolloutEngine
    version: WeightVersion = field(default_factory=lambda: WeightVersion(0))
    """Weight version of the engines."""
    engines_asleep: bool = False
    """True if the engines have released their memory, until the next publish."""
    _weights_awake: bool = False
    """True if the engines have the memory of their weights back, but not the rest yet."""
    _weights_due: bool = False
    """True if starting ranks have borrowed the memory of the engines' weights."""
    interrupted: PublishStats = field(default_factory=PublishStats)
    """Effect of the last publish on the engines' requests."""
    sent_bytes: int = 0
    """Bytes of weights that all trainer ranks sent in the last publish."""
    fleet: str = ROLLOUT
    """Name of the engines' fleet in the trainer's calls."""
    wave_share: float = 1.0
    """Largest share of the engines that a publish pauses at a time; less than 1 only if they do not
    take turns with the trainer."""
    _connected: dict[str, Sequence[EngineAddress]] = field(default_factory=dict)
    """Fleet -> engines that the trainer's channel to it is open to."""
    _joining: list[EngineAddress] = field(default_factory=list)
    """New engines, which answer from the next publish on."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the engines' weights, or the set of engines, change; several adapters share
    one."""
    _in_sync: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the trainer's weights are those of `version`."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Let the trainer use its devices and change its weights. Engines that take turns with it
        have released their memory, and sleep until `publish`."""
        async with self.scoring():
            self._in_sync.clear()
            yield

    @asynccontextmanager
    async def scoring(self) -> AsyncIterator[None]:
        """Do the same as `training`; the trainer's weights stay as they are."""
        async with self.changing:
            if self.shares_memory and not self.engines_asleep:
                self._in_sync.clear()
                await self._wake_trainer()
        yield

    async def _wake_trainer(self) -> None:
        await self.engines.sleep()
        self.engines_asleep = True
        await self.trainer.wake()

    @asynccontextmanager
    async def lend_to_ranks(self) -> AsyncIterator[None]:
        """Let new ranks start in the place of dead ones: engines that share devices with them
        release their memory within the context, and have the same state again afterwards."""
        if self._weights_awake:
            await self.engines.sleep_weights()
            self._weights_awake, self._weights_due = False, True
        elif self.shares_memory and not self.engines_asleep and not self.changing.locked():
            # only at the end of a run is a sleeping trainer asked for anything: nobody asks engines
            async with self.changing:
                self._in_sync.clear()
                await self.engines.pause()
                await self.engines.sleep()
                self.engines_asleep = True
        yield  # where it raises, the next ranks need the room, too
        if self._weights_due:
            await self.engines.wake_weights()
            self._weights_awake, self._weights_due = True, False

    async def publish(self, version: WeightVersion, *, verify: bool = False) -> None:
        """Send the trainer's weights to the engines as `version`, and let them answer again;
        interrupted requests continue. The trainer must be awake, as after `training`; if it takes
        turns with the engines, it sleeps afterwards. `resume` flushes the engines' caches and sets
        the version, once each. An engine that dies in the meantime is left out, if it will be
        replaced.

        `verify`: raise MismatchError if the engines then hold anything else; nobody may send them
        requests in the meantime.
        """
        async with self.changing:
            if self._wave_size < len(self.engines.engines):
                await self._publish_in_waves(version, verify=verify)
            else:
                await self._publish(version, verify=verify)
            self._in_sync.set()

    @property
    def _wave_size(self) -> int:
        """Return how many engines are paused at a time."""
        return max(1, int(decimal_product(len(self.engines.engines), self.wave_share)))

    async def _publish_in_waves(self, version: WeightVersion, *, verify: bool) -> None:
        """Pause, update and resume the engines in groups, one group after the other. To the trainer
        each group is a fleet of its own."""
        urls, size = [engine.url for engine in self.engines.engines], self._wave_size
        stats, sent = list[PublishStats](), 0
        for number, first in enumerate(range(0, len(urls), size)):
            wave = frozenset(urls[first : first + size])
            stats.append(await self.engines.pause_some(wave))
            await self._send(version, verify=verify, fleet=f"{self.fleet} {number}", wave=wave)
            sent += self.sent_bytes
            await self.engines.resume_some(wave, version)
        self.version, self.sent_bytes = version, sent
        self.interrupted = PublishStats(
            num_running=sum(one.num_running for one in stats),
            wait_s=sum(one.wait_s for one in stats),
            discarded_tokens=sum(one.discarded_tokens for one in stats),
            retractions=sum(one.retractions for one in stats),
            held_requests=max(one.held_requests for one in stats),
        )
        await self.engines.hold(version)

    async def replace(self, start: Callable[[], Awaitable[EngineAddress]]) -> None:
        """Start a new engine in the place of a dead one. It gets the weights of the others, which
        are compared bit for bit, and answers from then on. Raises what `start` raises, WorkerDied
        if it dies in the meantime, MismatchError."""
        if self.fleet == EVALUATION:  # what the others hold, the trainer has no more
            self._joining.append(await start())
        elif self.shares_memory:
            # it takes its memory while the trainer sleeps, who must wake to send it anything
            async with self._while_in_sync():
                engine = await start()
                await self.engines.pause()
                await self.engines.admit(engine, self.version)
                await self._wake_trainer()
                await self._publish(self.version, verify=True)
        else:
            engine = await start()
            async with self._while_in_sync():
                await self.trainer.connect_engines([engine], JOINING)
                await self.trainer.publish(self.version, JOINING)
                await self.trainer.verify(JOINING)
                await self.trainer.connect_engines([], JOINING)
                await self.engines.admit(engine, self.version)

    @asynccontextmanager
    async def _while_in_sync(self) -> AsyncIterator[None]:
        """Wait until trainer and engines hold the same weights, and keep it so within."""
        while True:
            await self._in_sync.wait()
            async with self.changing:
                if self._in_sync.is_set():
                    yield
                    return

    async def _publish(self, version: WeightVersion, *, verify: bool) -> None:
        self.interrupted = await self.engines.pause()
        while self._joining:
            with contextlib.suppress(WorkerDied):  # meanwhile: who watches it starts another
                await self.engines.admit(self._joining.pop(), version)
        if self.engines_asleep:
            await self.trainer.offload_optimizer_state()
            await self.engines.wake_weights()
            self._weights_awake = True
        await self._send(version, verify=verify, fleet=self.fleet)
        if self.engines_asleep:
            await self.trainer.sleep()
            self._weights_awake = False
            await self.engines.wake_cache()
            self.engines_asleep = False
        self.version = version
        await self.engines.resume(version)

    def _sent_to(self, wave: Collection[str] | None) -> list[EngineAddress]:
        return [one for one in self.engines.engines if wave is None or one.url in wave]

    async def _send(
        self,
        version: WeightVersion,
        *,
        verify: bool,
        fleet: str,
        wave: Collection[str] | None = None,
    ) -> None:
        """Send the weights to all engines, or to those of a wave, by URL; if one dies in the
        meantime, send them again to the others."""
        while engines := self._sent_to(wave):
            try:
                if engines != self._connected.get(fleet):
                    await self.trainer.connect_engines(engines, fleet)
                    self._connected[fleet] = engines
                self.sent_bytes = await self.trainer.publish(version, fleet)
                if verify:
                    await self.trainer.verify(fleet)
            except WorkerDied:
                is_removed = engines != self._sent_to(wave)  # somebody else saw it first
                if not is_removed and not await self.engines.remove_dead():
                    raise
            else:
                return
