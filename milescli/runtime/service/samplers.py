"""Assigns saved adapters to the engines of a service. Engines have a few slots; which adapter is in
which slot changes with the requests: the least recently used one is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.weights.channels import TensorChannel
from milescli.core.concurrency import in_thread
from milescli.core.errors import WaitTimeout
from milescli.core.types import EngineAddress, WeightVersion
from milescli.models.adapter import PEFT_WEIGHTS, engine_name
from milescli.weights.base import Bucket

SLOT_TIMEOUT_S = 1800.0
"""Bound on a request's wait for an adapter that makes room for its own. Requests in the slots are
bounded by the engines' clients."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    name: str
    """Name by which engines know it."""
    fleet: SglangFleet
    """Client that requests its adapter."""
    wanted: Path | None = None
    """PEFT folder that is in it, or will be; None if it was never used."""
    is_filled: bool = False
    """True if the engines hold it."""
    num_users: int = 0
    """Requests that use it, or wait until it is filled."""
    used: int = 0
    """Number of its last use, of all."""


class Samplers:
    """Fills slots of the engines. Belongs to one event loop."""

    def __init__(self, base: SglangFleet, slots: Mapping[str, SglangFleet]) -> None:
        """Set up the slots. `base`: the client that requests the model itself; `slots`: by name,
        the client of each. The adapters are sent through the memory of this process, which must run
        on the engines' computer."""
        self.base = base
        self._slots = [_Slot(name=name, fleet=fleet) for name, fleet in slots.items()]
        self._channel = TensorChannel()
        self._connected = list[str]()
        """URLs of the engines that the channel sends to."""
        self._changed = asyncio.Condition()
        self._filling = asyncio.Lock()
        self._uses = 0

    @property
    def fleets(self) -> list[SglangFleet]:
        """Return all clients of the engines."""
        return [self.base, *(slot.fleet for slot in self._slots)]

    async def close(self) -> None:
        """Close all clients."""
        await in_thread(self._channel.close)
        for fleet in self.fleets:
            await fleet.close()

    async def admit(self, engine: EngineAddress) -> None:
        """Let a new engine, in the place of a dead one, answer once it holds all adapters."""
        async with self._filling:
            for slot in self._slots:
                slot.is_filled = slot.is_filled and slot.wanted is not None and slot.wanted.exists()
                if slot.is_filled and slot.wanted is not None:
                    await self._send(slot.name, slot.wanted, [engine])
            for fleet in self.fleets:
                await fleet.admit(engine, fleet.version)

    @asynccontextmanager
    async def fleet_with(self, folder: Path | None) -> AsyncIterator[SglangFleet]:
        """Provide the client that requests the adapter of a PEFT folder; None: the model itself.
        Waits if all slots are in use. Raises EngineRefused, WaitTimeout or WorkerDied."""
        if folder is None:
            yield self.base
            return
        slot = await self._slot_of(folder)
        try:
            async with self._filling:
                if not slot.is_filled:
                    await self._fill(slot, folder)
            yield slot.fleet
        finally:
            async with self._changed:
                slot.num_users -= 1
                self._changed.notify_all()

    async def _slot_of(self, folder: Path) -> _Slot:
        """Reserve the slot that holds the folder, or one that will hold it."""
        async with self._changed:
            try:
                async with asyncio.timeout(SLOT_TIMEOUT_S):
                    while (slot := self._choose_slot(folder)) is None:
                        await self._changed.wait()
            except TimeoutError:
                raise WaitTimeout(
                    "a sampler timed out waiting for room in the engines",
                    why=f"all {len(self._slots)} adapters that they hold were in use for "
                    f"{SLOT_TIMEOUT_S:g} s",
                    fix="sample from fewer adapters at once, or with fewer tokens",
                ) from None
            if slot.wanted != folder:
                slot.wanted, slot.is_filled = folder, False
            self._uses += 1
            slot.num_users, slot.used = slot.num_users + 1, self._uses
            return slot

    def _choose_slot(self, folder: Path) -> _Slot | None:
        own = [slot for slot in self._slots if slot.wanted == folder]
        free = [slot for slot in self._slots if not slot.num_users]
        return min(own or free, key=lambda slot: slot.used, default=None)

    async def _fill(self, slot: _Slot, folder: Path) -> None:
        """Send an adapter to a slot. If all engines died, the next one gets it before it
        answers."""
        await slot.fleet.pause()
        try:
            if slot.fleet.engines:
                await self._send(slot.name, folder, slot.fleet.engines)
            slot.is_filled = True
        finally:  # the requests of other slots wait, too
            await slot.fleet.resume(WeightVersion(slot.fleet.version + 1))

    async def _send(self, slot: str, folder: Path, engines: Sequence[EngineAddress]) -> None:
        urls = [engine.url for engine in engines]
        if urls != self._connected:
            self._connected = []
            own = [replace(engine, sharing_ranks=[0] * engine.tp) for engine in engines]
            await in_thread(lambda: self._channel.open(own))
            self._connected = urls
        bucket = await in_thread(lambda: _bucket(slot, folder))
        await in_thread(lambda: self._channel.send(iter([bucket])))


def _bucket(slot: str, folder: Path) -> Bucket:
    """Return the adapter's tensors in the form that engines load into a slot."""
    tensors = load_file(folder / PEFT_WEIGHTS)
    return [(engine_name(slot, name), tensor) for name, tensor in tensors.items()]
