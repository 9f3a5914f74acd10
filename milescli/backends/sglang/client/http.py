"""HTTP to engines: every call has a time limit, and every failure a named error. The fleet in the
driver uses `EngineHttp`; a trainer rank, whose code is not async, uses `Orders`: the same HTTP on
an event loop in a separate thread."""

from __future__ import annotations

import asyncio
import math
import resource
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import aiohttp

from milescli.backends.sglang.launch.key import bearer
from milescli.core.errors import MilesError, WaitTimeout, WorkerDied
from milescli.core.files import last_log_lines, parse_json
from milescli.core.silence import sounds_like_lost_peer
from milescli.core.types import EngineAddress
from milescli.core.units import format_duration

RETRY_WAITS_S = (0.1, 0.5, 2.0)
"""Seconds before each retry of a request whose connection broke."""
HEALTH_TIMEOUT_S = 10.0
"""Time for an engine to answer /health: a living engine answers while it works, but a busy machine
may take seconds, or longer: see `find_dead`."""
_EVENT, _LAST_EVENT = b"data: ", b"data: [DONE]"
MAX_LINE_BYTES = 2**26
"""Largest streamed object: a response's tokens, log-probs and routing."""
KEEP_ALIVE_S = 2.0
"""Lifetime of an unused connection. SGLang closes one after 5 s; using it at that moment would lose
an order, which is not retried."""
MAX_FILES, OTHER_FILES = 65_536, 512
"""Most files and sockets that a process may open, and how many of them are not sockets to engines.
A call carries 8 to 32 requests and lasts as long as the longest of them, so 32 engines that run 256
each have some 5,000 calls open."""


class EngineRefused(MilesError):
    """Reports that an engine refused an order (4xx)."""


class EngineDied(WorkerDied):
    """Reports which engine no longer answers."""

    url: str | None = None
    """URL of the engine; None after the error has crossed to another process."""


class ConnectionBroken(WorkerDied):
    """Reports that a connection broke or a server failed although every engine still answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Holds one request."""

    engine: EngineAddress
    path: str
    timeout_s: float

    @property
    def url(self) -> str:
        """Return the URL of the request."""
        return f"{self.engine.url}{self.path}"


class EngineHttp:
    """Holds one connection pool for all engines; belongs to one event loop."""

    def __init__(self, engines: Sequence[EngineAddress], *, caller: str) -> None:
        """Name the `caller` for errors ("the rollout"). Opens nothing yet."""
        keys = {engine.api_key for engine in engines}
        assert len(keys) == 1, f"{len(keys)} keys of one run"
        self.engines = list(engines)
        """Engines in service; may change."""
        self._caller = caller
        self.headers = bearer(keys.pop())
        """Headers of every request."""
        self._last_reply_s = {engine.name: time.monotonic() for engine in engines}
        """Name of each engine that was ever in service -> time of its last reply."""
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """Return the session, created on first use inside the running loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=_max_connections(), limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None),
                read_bufsize=MAX_LINE_BYTES,
            )
        return self._session

    def silent_s(self, url: str) -> float:
        """Return the seconds since the engine at this URL replied; infinity if never."""
        names = [engine.name for engine in self.engines if engine.url == url]
        last = max((self._last_reply_s.get(name, -math.inf) for name in names), default=-math.inf)
        return time.monotonic() - last

    async def close(self) -> None:
        """Close the sockets."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(
        self, engine: EngineAddress, path: str, body: dict[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """POST a request that may be repeated to one engine, and return the reply. If the
        connection breaks although the engine answers (a kept-alive socket that closed at the same
        moment, a full backlog), it is sent again. Raises as `order`."""
        for wait_s in RETRY_WAITS_S:
            try:
                return await self.order(engine, path, body, timeout_s=timeout_s)
            except ConnectionBroken:
                await asyncio.sleep(wait_s)
        return await self.order(engine, path, body, timeout_s=timeout_s)

    async def stream(
        self, engine: EngineAddress, path: str, body: dict[str, Any], *, timeout_s: float
    ) -> AsyncGenerator[dict[str, Any]]:
        """POST to one engine, which streams objects (server-sent events), and yield each as it
        arrives. Raises as `order`."""
        call = _Call(engine=engine, path=path, timeout_s=timeout_s)
        async with self._open(call, body) as response:
            if response.status != 200:
                await self._check(call, response)
            async for line in response.content:
                if line.startswith(_EVENT) and not line.startswith(_LAST_EVENT):
                    part = parse_json(line[len(_EVENT) :])
                    if error := part.get("error"):
                        raise _refused(call, str(error))
                    self._last_reply_s[engine.name] = time.monotonic()
                    yield part

    async def order(
        self, engine: EngineAddress, path: str, body: dict[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """POST to one engine, and return the reply. Raises EngineRefused, EngineDied, WaitTimeout,
        and ConnectionBroken if the connection broke and the engine still answers."""
        call = _Call(engine=engine, path=path, timeout_s=timeout_s)
        async with self._open(call, body) as response:
            reply = _as_object(await self._check(call, response))
        self._last_reply_s[engine.name] = time.monotonic()
        return reply

    @asynccontextmanager
    async def _open(
        self, call: _Call, body: dict[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response to a POST before its content is read. Turns failures, also of reading,
        into named errors."""
        try:
            async with (
                asyncio.timeout(call.timeout_s) as bound,
                self.session().post(call.url, json=body, headers=self.headers) as response,
            ):
                yield response
        except TimeoutError:
            if not bound.expired():
                raise
            raise await self._timed_out(call) from None
        except aiohttp.ClientError as error:
            detail = f"{type(error).__name__}: {error}"
            raise await self._broken(call, detail) from error

    async def _check(self, call: _Call, response: aiohttp.ClientResponse) -> str:
        """Return the text of a successful response; raise the error of any other."""
        text = await response.text()
        if response.status >= 500:
            raise await self._broken(call, f"HTTP {response.status}: {text[:2000]}")
        if response.status != 200:
            raise _refused(call, f"HTTP {response.status}: {text[:2000]}")
        return text

    async def _timed_out(self, call: _Call) -> MilesError:
        dead = await self.find_dead([call.engine])
        if dead is not None:
            return dead
        silence = "; ".join(
            f"{name} last replied {format_duration(time.monotonic() - at)} ago"
            for name, at in self._last_reply_s.items()
        )
        return WaitTimeout(
            f"{call.engine.name} did not answer {call.url}",
            why=f"{self._caller} waited {format_duration(call.timeout_s)}; {silence}",
            fix=f"--set machine.step_timeout_s={2 * call.timeout_s:.0f}   # if the work takes "
            "that long; otherwise read the engine's log",
        )

    async def _broken(self, call: _Call, detail: str) -> MilesError:
        within_s = max(call.timeout_s, HEALTH_TIMEOUT_S)
        return await self.find_dead([call.engine], detail, within_s=within_s) or ConnectionBroken(
            f"{call.engine.name} failed at {call.url}",
            why=f"{detail}; the engine still responds",
            fix="read the engine's log",
        )

    async def find_dead(
        self,
        engines: Sequence[EngineAddress],
        detail: str = "",
        *,
        within_s: float = HEALTH_TIMEOUT_S,
    ) -> EngineDied | None:
        """Return the error for the first of the engines that is known to be dead, or None.
        `detail`: why the caller asks.

        A dead engine refuses /health at once. A busy one may answer late, within at most
        `within_s`. The watcher of its processes (`runtime.recovery`) distinguishes a busy engine
        from one that hangs, and ends the latter, which then refuses too."""
        engine_of = {
            asyncio.ensure_future(self.is_alive(engine, within_s=within_s)): engine
            for engine in engines
        }
        waiting = set(engine_of)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for reply in done:
                    if not reply.result():
                        return engine_died(engine_of[reply], detail)
        finally:
            for reply in waiting:
                reply.cancel()
        return None

    async def loads(self, engine: EngineAddress) -> list[dict[str, Any]]:
        """Return the load of each data-parallel rank of an engine; empty if it does not report it
        in time."""
        try:
            async with (
                asyncio.timeout(HEALTH_TIMEOUT_S),
                self.session().get(
                    f"{engine.url}/v1/loads?include=core", headers=self.headers
                ) as response,
            ):
                found = await response.json() if response.status == 200 else {}
        except (TimeoutError, aiohttp.ClientError, ValueError):
            return []
        return found.get("loads") or []

    async def is_alive(self, engine: EngineAddress, *, within_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Return True if the engine answers /health with 200 within this time."""
        try:
            async with (
                asyncio.timeout(within_s),
                self.session().get(f"{engine.url}/health") as response,
            ):
                alive = response.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False
        if alive:
            self._last_reply_s[engine.name] = time.monotonic()
        return alive


def _max_connections() -> int:
    """Raise this process's limit of open files as far as the system allows, up to `MAX_FILES`;
    return the number of connections that leaves room for other files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most - OTHER_FILES, most // 2)


def _refused(call: _Call, why: str) -> EngineRefused:
    return EngineRefused(
        f"{call.engine.name} rejected {call.url}",
        why=why,
        fix="read the engine's log for the cause",
    )


def engine_died(engine: EngineAddress, detail: str) -> EngineDied:
    """Return the error of a dead engine, with its last log lines."""
    words = f"its log ends:\n{last_log_lines(engine.log_path)}"
    error = EngineDied(
        f"{engine.name} is dead: {engine.url} does not answer",
        why=f"{detail}; {words}" if detail else words,
        fix=f"less {engine.log_path}" if engine.log_path else "read the log of this engine",
    )
    error.url = engine.url
    return error


def _as_object(text: str) -> dict[str, Any]:
    """Return a reply as an object: plain text, which some orders return, becomes its `message`."""
    try:
        reply = parse_json(text)
    except ValueError:
        return {"message": text}
    return reply if isinstance(reply, dict) else {"message": reply}


GRACE_S = 5.0
"""Time for an engine that has lost a rank to end completely."""

Reply = Future[dict[str, Any]]


class Orders:
    """Sends orders from a trainer rank to the engines of one channel, all at once."""

    def __init__(self, engines: list[EngineAddress], *, timeout_s: float) -> None:
        """Send orders to `engines`. `timeout_s` bounds each order."""
        self.engines = engines
        self.timeout_s = timeout_s
        self._http = EngineHttp(engines, caller="the trainer")
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="engine-orders", daemon=True)
        self._thread.start()

    def begin_all(
        self, path: str, bodies: list[dict[str, Any]], *, timeout_s: float | None = None
    ) -> list[Reply]:
        """Send body i to engine i without waiting. `timeout_s` replaces the bound of all orders."""
        bound_s = self.timeout_s if timeout_s is None else timeout_s
        return [
            self._soon(self._http.order(engine, path, body, timeout_s=bound_s))
            for engine, body in zip(self.engines, bodies, strict=True)
        ]

    def _soon(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def finish(self, replies: list[Reply]) -> list[dict[str, Any]]:
        """Return the replies. Raises the first failure at once, since a dead engine can block the
        others. Each order has its own bound."""
        done, _ = wait(replies, return_when=FIRST_EXCEPTION)
        for reply in replies:
            if reply in done and (error := reply.exception()):
                raise self._first_cause(error)
        return [reply.result() for reply in replies]

    def _first_cause(self, error: BaseException) -> BaseException:
        """Return the error of the engine that died: an engine that reports the loss of a peer is
        not the one, which refuses requests within moments."""
        if not isinstance(error, EngineRefused) or not sounds_like_lost_peer(error.why):
            return error
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            search = self._http.find_dead(
                self.engines, f"{error.what}: {error.why}", within_s=self.timeout_s
            )
            if (dead := self._soon(search).result()) is not None:
                return dead
            time.sleep(0.1)
        return error

    def close(self) -> None:
        """Close sockets and thread; cancels an order in progress."""
        self._soon(self._http.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
