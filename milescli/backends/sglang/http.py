"""HTTP to engines and router: every call bounded, every failure named. Used by the fleet; knows no
rollout."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from milescli.backends.sglang.key import bearer
from milescli.backends.sglang.process import last_log_lines
from milescli.core.errors import MilesError, WaitTimeout, WorkerDied
from milescli.core.units import format_duration

RETRY_WAITS_S = (0.1, 0.5, 2.0)
"""Before each further try of a question whose connection broke."""
HEALTH_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 1024
"""Open sockets to the door and the engines together; further requests wait for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHandle:
    """One engine of the fleet, as errors call it and as HTTP reaches it."""

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    """What its requests must bear. Equal for all engines behind one router, which asks for it
    too."""
    log_path: Path | None = None
    """Where its last words are; None or unreadable: errors do without."""

    def last_words(self) -> str:
        """For errors."""
        return (
            f"its log ends:\n{last_log_lines(self.log_path)}"
            if self.log_path
            else "its log is not on this machine"
        )


class _Hiccup(WorkerDied):
    """A connection broke, and every engine still answers."""


class FleetHttp:
    """One connection pool for the whole fleet; belongs to one event loop."""

    def __init__(self, *, router_url: str, engines: list[EngineHandle]) -> None:
        """Opens nothing yet."""
        keys = {engine.api_key for engine in engines}
        assert len(keys) == 1, f"{len(keys)} keys for one router"
        self.router_url = router_url
        self.engines = engines
        self._headers = bearer(keys.pop())
        self._last_answer_s = {engine.name: time.monotonic() for engine in engines}
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """Made on first use, inside the running loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, limit_per_host=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session

    async def close(self) -> None:
        """Give the sockets back."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask_router(
        self, path: str, body: dict[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """POST to whichever engine the router picks. Raises WorkerDied where that finds an engine
        dead.

        A connection that breaks although every engine answers (a kept-alive socket that closed at
        the same moment, a full backlog) is tried again: nothing is lost by that, for equal seeds
        give equal answers.
        """
        for wait_s in RETRY_WAITS_S:
            try:
                return await self._post(
                    f"{self.router_url}{path}", body, who="the router", timeout_s=timeout_s
                )
            except _Hiccup:
                await asyncio.sleep(wait_s)
        return await self._post(
            f"{self.router_url}{path}", body, who="the router", timeout_s=timeout_s
        )

    async def order(
        self, engine: EngineHandle, path: str, body: dict[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """POST to one engine."""
        answer = await self._post(f"{engine.url}{path}", body, who=engine.name, timeout_s=timeout_s)
        self._last_answer_s[engine.name] = time.monotonic()
        return answer

    async def order_all(
        self, path: str, body: dict[str, Any], *, timeout_s: float
    ) -> list[dict[str, Any]]:
        """POST to every engine at once; the answers in the order of `engines`."""
        return list(
            await asyncio.gather(
                *(self.order(engine, path, body, timeout_s=timeout_s) for engine in self.engines)
            )
        )

    async def _post(
        self, url: str, body: dict[str, Any], *, who: str, timeout_s: float
    ) -> dict[str, Any]:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.session().post(url, json=body, headers=self._headers) as response,
            ):
                text = await response.text()
                status = response.status
        except TimeoutError:
            raise await self._timed_out(url, who=who, timeout_s=timeout_s) from None
        except aiohttp.ClientError as error:
            raise await self._broken(
                url, who=who, detail=f"{type(error).__name__}: {error}"
            ) from error
        if status >= 500:
            raise await self._broken(url, who=who, detail=f"HTTP {status}: {text[:500]}")
        if status != 200:
            raise MilesError(
                f"{who} refused {url}",
                why=f"HTTP {status}: {text[:500]}",
                fix="read the engine's log for the cause",
            )
        return _as_object(text)

    async def _timed_out(self, url: str, *, who: str, timeout_s: float) -> MilesError:
        dead = await self.find_dead()
        if dead is not None:
            return dead
        silence = "; ".join(
            f"{name} last answered {format_duration(time.monotonic() - at)} ago"
            for name, at in self._last_answer_s.items()
        )
        return WaitTimeout(
            f"{who} did not answer {url}",
            why=f"the rollout waited {format_duration(timeout_s)}; {silence}",
            fix=f"--set machine.step_timeout_s={2 * timeout_s:.0f}   # if the work is that long; "
            "else read the engine's log",
        )

    async def _broken(self, url: str, *, who: str, detail: str) -> MilesError:
        return await self.find_dead() or _Hiccup(
            f"{who} failed at {url}",
            why=f"{detail}; every engine still answers",
            fix="read the log of the router and of the engines",
        )

    async def find_dead(self) -> WorkerDied | None:
        """The error for the first engine that does not answer /health, or None. Each is asked, for
        HEALTH_TIMEOUT_S at most."""
        answers = await asyncio.gather(*(self._is_alive(engine) for engine in self.engines))
        for engine, alive in zip(self.engines, answers, strict=True):
            if not alive:
                return WorkerDied(
                    f"{engine.name} is dead: {engine.url} does not answer",
                    why=engine.last_words(),
                    fix=f"less {engine.log_path}"
                    if engine.log_path
                    else "read the log of this engine",
                )
        return None

    async def _is_alive(self, engine: EngineHandle) -> bool:
        try:
            async with (
                asyncio.timeout(HEALTH_TIMEOUT_S),
                self.session().get(f"{engine.url}/health") as response,
            ):
                alive = response.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False
        if alive:
            self._last_answer_s[engine.name] = time.monotonic()
        return alive


def _as_object(text: str) -> dict[str, Any]:
    """Some orders answer in plain words: those come under `message`."""
    try:
        answer = json.loads(text)
    except ValueError:
        return {"message": text}
    return answer if isinstance(answer, dict) else {"message": answer}
