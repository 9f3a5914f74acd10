"""What is asked of engines that are slow, or gone."""

from __future__ import annotations

import asyncio
import resource

import pytest
from aiohttp import web

from milescli.backends.sglang.client import http
from milescli.backends.sglang.client.http import ConnectionBroken, EngineDied, EngineHttp
from milescli.core.types import EngineAddress
from milescli.platform.ports import free_ports


class SlowHealth:
    """Fails all that is asked; answers /health when it may,
    or drops the connection."""

    def __init__(self) -> None:
        self.may_answer, self.was_asked = asyncio.Event(), asyncio.Event()
        self.is_ended = False

    async def start(self) -> str:
        """Returns its address."""
        app = web.Application()
        app.add_routes([web.get("/health", self._health), web.post("/generate", self._fail)])
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        port = free_ports(1)[0]
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{port}"

    async def _fail(self, request: web.Request) -> web.Response:
        return web.Response(status=503, text="no worker answers")

    async def _health(self, request: web.Request) -> web.Response:
        self.was_asked.set()
        await self.may_answer.wait()
        if self.is_ended:
            request.transport.close()
        return web.Response()

    async def close(self) -> None:
        await self._runner.cleanup()


@pytest.mark.parametrize("is_ended", [False, True])
def test_an_engine_that_computes_is_waited_for_and_one_that_is_ended_meanwhile_is_dead(
    is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEALTH_TIMEOUT_S", 0.01)

    async def use() -> None:
        engine = SlowHealth()
        address = EngineAddress(url=await engine.start(), name="engine 0", tp=1, sharing_ranks=[0])
        client = EngineHttp([address], caller="the rollout")
        asked = asyncio.ensure_future(client.order(address, "/generate", {}, timeout_s=300))
        await engine.was_asked.wait()
        done, _ = await asyncio.wait([asked], timeout=0.2)
        assert not done, "it was judged before it answered"
        engine.is_ended = is_ended
        engine.may_answer.set()
        try:
            with pytest.raises(EngineDied if is_ended else ConnectionBroken):
                await asked
        finally:
            await client.close()
            await engine.close()

    asyncio.run(use())


def test_the_dead_one_of_several_is_found_while_another_is_slow() -> None:
    async def use() -> None:
        engine = SlowHealth()
        slow = EngineAddress(url=await engine.start(), name="slow", tp=1, sharing_ranks=[0])
        gone = EngineAddress(
            url=f"http://127.0.0.1:{free_ports(1)[0]}", name="gone", tp=1, sharing_ranks=[0]
        )
        client = EngineHttp([slow, gone], caller="the rollout")
        try:
            dead = await client.find_dead([slow, gone], within_s=300)
            assert dead is not None and dead.url == gone.url
            engine.may_answer.set()
            assert await client.find_dead([slow], within_s=300) is None
        finally:
            await client.close()
            await engine.close()

    asyncio.run(use())


def test_calls_to_many_engines_are_not_bounded_by_the_files_that_a_shell_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    address = EngineAddress(url="http://127.0.0.1:9", name="engine", tp=1, sharing_ranks=[0])

    async def most() -> int:
        client = EngineHttp([address], caller="the rollout")
        try:
            return client.session().connector.limit
        finally:
            await client.close()

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        allowed = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
        assert allowed // 2 <= asyncio.run(most()) < allowed
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == max(allowed, min(soft, 1024))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
