"""Orders to engines from a trainer rank, which is no coroutine: the same HTTP as the fleet's, on an
event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from threading import Thread
from typing import Any

from milescli.backends.sglang.http import EngineHttp, EngineRefused
from milescli.core.silence import sounds_like_lost_peer
from milescli.core.types import EngineAddress

GRACE_S = 5.0
"""For an engine that has lost a rank to end altogether."""

Reply = Future[dict[str, Any]]


class Orders:
    """The engines of one channel, all at work at once."""

    def __init__(self, engines: list[EngineAddress], *, timeout_s: float) -> None:
        """`timeout_s` bounds each order."""
        self.engines = engines
        self.timeout_s = timeout_s
        self._http = EngineHttp(engines, caller="the trainer")
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="engine-orders", daemon=True)
        self._thread.start()

    def begin_all(
        self, path: str, bodies: list[dict[str, Any]], *, timeout_s: float | None = None
    ) -> list[Reply]:
        """Send body i to engine i; does not wait. `timeout_s`: where another bound than that of all
        orders holds."""
        bound_s = self.timeout_s if timeout_s is None else timeout_s
        return [
            self._soon(self._http.order(engine, path, body, timeout_s=bound_s))
            for engine, body in zip(self.engines, bodies, strict=True)
        ]

    def _soon(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def finish(self, replies: list[Reply]) -> list[dict[str, Any]]:
        """The replies; or the first failure, at once: a dead engine can keep the others waiting for
        it. Each order is bounded by itself."""
        done, _ = wait(replies, return_when=FIRST_EXCEPTION)
        for reply in replies:
            if reply in done and (error := reply.exception()):
                raise self._first_cause(error)
        return [reply.result() for reply in replies]

    def _first_cause(self, error: BaseException) -> BaseException:
        """An engine that says that it lost a peer is not the one that died: that one refuses
        within moments."""
        if not isinstance(error, EngineRefused) or not sounds_like_lost_peer(error.why):
            return error
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            found = self._http.find_dead(
                self.engines, f"{error.what}: {error.why}", within_s=self.timeout_s
            )
            if (dead := self._soon(found).result()) is not None:
                return dead
            time.sleep(0.1)
        return error

    def order_all(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The same order to all, and their replies."""
        return self.finish(self.begin_all(path, [body] * len(self.engines)))

    def close(self) -> None:
        """Give sockets and thread back; an order that is under way is given up."""
        self._soon(self._http.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
