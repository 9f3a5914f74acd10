"""A real engine joins a fleet, and is killed while it responds: what it was asked, the other one is
asked."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import psutil
import pytest

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.client.http import EngineDied
from milescli.backends.sglang.launch.server import EngineServer
from milescli.core.types import EngineAddress, WeightVersion
from milescli.platform.ports import free_ports
from milescli.rollout.base import GenerateRequest
from tests.backends.sglang.conftest import HOST, KEY, Service
from tests.backends.sglang.warm_engines import engine_of

pytestmark = pytest.mark.engine
REQUESTS = [
    GenerateRequest(prompt_ids=[5, 6, 7 + seed], max_new_tokens=400, seed=seed, stop=["never"])
    for seed in range(16)
]


@pytest.fixture
def second(service: Service, tmp_path):
    """Another engine of the same model, to be killed."""
    spec = replace(
        service.engine.spec,
        name="engine 1",
        port=free_ports(1, host=HOST)[0],
        log_path=tmp_path / "engine-1.log",
    )
    engine = engine_of(spec)
    engine.start()
    try:
        engine.wait_ready(400)
        yield engine
    finally:
        engine.stop()


def _kill_detokenizer(engine: EngineServer) -> None:
    """SGLang itself does not notice, and its requests wait: the engine counts as ended."""
    parts = psutil.Process(engine.pid).children(recursive=True)
    detokenizer = next(part for part in parts if "detokenizer" in part.name())
    assert engine.ended() is None
    detokenizer.kill()
    psutil.wait_procs([detokenizer], timeout=60)
    assert "detokenizer is gone" in (engine.ended() or "")


def test_an_engine_joins_responds_and_dies_and_nothing_of_it_is_lost(
    service: Service, second: EngineServer
) -> None:
    address = EngineAddress(url=second.url, name="engine 1", api_key=KEY, log_path=second.log_path)
    heard: list[EngineDied] = []

    async def main():
        fleet = SglangFleet(engines=[service.address], response_timeout_s=120)
        try:
            alone = await asyncio.gather(*(fleet.generate(each) for each in REQUESTS))
            await fleet.admit(address, WeightVersion(3))
            await asyncio.gather(*(fleet.generate(each) for each in REQUESTS[:4]))
            fleet.on_death = heard.append
            tasks = [asyncio.create_task(fleet.generate(each)) for each in REQUESTS]
            await asyncio.sleep(0.3)
            await asyncio.to_thread(_kill_detokenizer, second)
            os.killpg(second.pid or 0, signal.SIGKILL)
            together = await asyncio.gather(*tasks)
            return alone, together, list(fleet.engines)
        finally:
            await fleet.close()

    alone, together, left = asyncio.run(main())
    assert [each.response_ids for each in together] == [each.response_ids for each in alone]
    assert {error.url for error in heard} == {second.url}
    assert left == [service.address]
