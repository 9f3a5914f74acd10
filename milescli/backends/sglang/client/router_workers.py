"""The list of engines to which the router sends requests, as engines die and come. Used by the
fleet."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from milescli.backends.sglang.client.http import EngineHttp
from milescli.core.errors import WaitTimeout
from milescli.core.types import EngineAddress
from milescli.core.units import format_duration

CHANGE_TIMEOUT_S = 60.0
"""Time for the router to add or remove an engine; it first asks a new one for its model."""
POLL_S = 0.1


class RouterWorkers:
    """Maintains the list of engines to which the router sends requests while it runs, as engines
    die and come. Calls the router through `http`."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def add(self, engine: EngineAddress) -> None:
        """Add an engine; returns when it gets requests. Raises WaitTimeout, EngineRefused."""
        await self._ask("POST", "/workers", {"url": engine.url, "api_key": engine.api_key})
        await self._until(engine.url, lambda worker: bool(worker and worker["is_healthy"]))

    async def remove(self, url: str) -> None:
        """Remove an engine; returns when it gets no more requests. Raises WaitTimeout."""
        worker = await self._worker(url)
        if worker is not None:
            await self._ask("DELETE", f"/workers/{worker['id']}", None)
        await self._until(url, lambda worker: worker is None)

    async def _until(self, url: str, is_so: Any) -> None:
        try:
            async with asyncio.timeout(CHANGE_TIMEOUT_S):
                while not is_so(await self._worker(url)):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise WaitTimeout(
                f"the router could not add or remove {url}",
                why="its list of workers was not updated within "
                f"{format_duration(CHANGE_TIMEOUT_S)}",
                fix="read the router's log",
            ) from None

    async def _worker(self, url: str) -> dict[str, Any] | None:
        """Return what the router says of an engine; None: it does not know it, or does not
        answer."""
        listed = await self._ask("GET", "/workers", None)
        workers = listed.get("workers", [])
        return next((worker for worker in workers if worker["url"] == url), None)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Return the router's reply; empty where it does not answer: it may be about to be
        replaced."""
        url = f"{self._http.router_url}{path}"
        try:
            async with (
                asyncio.timeout(CHANGE_TIMEOUT_S),
                self._http.session().request(
                    method, url, json=body, headers=self._http.headers
                ) as response,
            ):
                return await response.json(content_type=None) or {}
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return {}
