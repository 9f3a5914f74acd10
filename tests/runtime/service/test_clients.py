"""How many adapters a service trains at a time."""

from __future__ import annotations

import asyncio
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
