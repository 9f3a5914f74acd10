"""How many adapters a service trains at a time, and which it removes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from milescli.runtime.service.clients import MAX_ADAPTERS, Clients


class Trainer:
    """Two ranks, of which each holds 40 bytes of an adapter."""

    async def call(self, method: str) -> list[int]:
        """What the ranks say."""
        assert method == "client_bytes"
        return [40, 40]


@pytest.mark.parametrize(("available", "most"), [(10, 1), (1000, 10), (10**6, MAX_ADAPTERS)])
def test_no_more_adapters_are_trained_than_main_memory_holds(available: int, most: int) -> None:
    nothing: Any = None
    trainer: Any = Trainer()
    clients = Clients(service_model=nothing, trainer=trainer, samplers=nothing, states=nothing)
    assert asyncio.run(clients.limit_adapters(available)) == 80
    assert clients.max_adapters == most


class SlowTrainer:
    """Needs until `ready` to begin an adapter."""

    def __init__(self) -> None:
        self.begins, self.ready = asyncio.Event(), asyncio.Event()
        self.dropped: list[str] = []

    async def call(self, method: str, *given: Any, adapter: str = "") -> None:
        """Begin an adapter, or drop one."""
        if method == "drop_adapter":
            self.dropped += given
            return
        self.begins.set()
        await self.ready.wait()


def test_an_adapter_that_was_begun_while_its_session_ended_is_removed() -> None:
    async def work() -> list[str]:
        trainer: Any = SlowTrainer()
        served: Any = SimpleNamespace(shape=SimpleNamespace(rank=4))
        nothing: Any = None
        clients = Clients(service_model=served, trainer=trainer, samplers=nothing, states=nothing)
        session = clients.new_session("somebody")
        creating = asyncio.ensure_future(clients.create("m", session, "somebody", {"rank": 4}))
        await trainer.begins.wait()
        clients.sessions[session].last_heartbeat = float("-inf")
        await clients.end_silent_sessions(print)
        trainer.ready.set()
        await creating
        await clients.end_silent_sessions(print)
        return trainer.dropped

    assert asyncio.run(work()) == ["m"]
