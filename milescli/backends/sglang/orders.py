"""Orders to engines from a trainer rank: plain blocking HTTP, all engines at once, bounded and
named. The fleet has its own (`http.py`)."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

from milescli.backends.sglang.key import bearer
from milescli.backends.sglang.process import DIRECT, status
from milescli.core.errors import MilesError, WaitTimeout, WorkerDied
from milescli.core.units import format_duration
from milescli.weights.base import EngineAddress

LOST_PEER = ("closed by peer", "reset by peer", "gloo", "NCCL")
"""How the collectives of an engine say that another process has left."""
GRACE_S = 5.0
"""For an engine that has lost a rank to end altogether."""


class OrderRefused(MilesError):
    """The engine answered that it could not."""


def post(engine: EngineAddress, path: str, body: dict[str, Any], *, timeout_s: float) -> str:
    """The answer's text. Raises OrderRefused (4xx), WorkerDied (no connection, 5xx) or WaitTimeout,
    each with the engine's URL."""
    url, data = engine.url, json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **bearer(engine.api_key)}
    request = urllib.request.Request(f"{url}{path}", data=data, headers=headers)
    try:
        with DIRECT.open(request, timeout=timeout_s) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:2000]
        if error.code < 500:
            raise OrderRefused(
                f"engine {url} refused {path}",
                why=f"HTTP {error.code}: {text}",
                fix="read the engine's log for the cause",
            ) from None
        raise _dead(url, path, f"HTTP {error.code}: {text}") from None
    except TimeoutError:
        raise _late(url, path, timeout_s) from None
    except (OSError, HTTPException) as error:
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise _late(url, path, timeout_s) from None
        raise _dead(url, path, f"{type(error).__name__}: {error}") from None


def _dead(url: str, path: str, detail: str) -> WorkerDied:
    return WorkerDied(
        f"engine {url} died while it was told {path}",
        why=detail,
        fix="read the log of the engine at that address",
    )


def _is_alive(engine: EngineAddress) -> bool:
    try:
        return status(f"{engine.url}/health", timeout_s=GRACE_S) == HTTPStatus.OK
    except OSError:
        return False


def _late(url: str, path: str, timeout_s: float) -> WaitTimeout:
    return WaitTimeout(
        f"engine {url} did not answer {path}",
        why=f"the trainer waited {format_duration(timeout_s)}",
        fix=f"--set machine.step_timeout_s={2 * timeout_s:.0f}   # if the model is that large; "
        "else read the engine's log",
    )


class Orders:
    """The engines of one channel; a thread each, so that they work at once."""

    def __init__(self, engines: list[EngineAddress], *, timeout_s: float) -> None:
        """`timeout_s` bounds each order."""
        self.engines = engines
        self.timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(
            max_workers=max(1, len(engines)), thread_name_prefix="engine-order"
        )

    def begin_all(
        self, path: str, bodies: list[dict[str, Any]], *, timeout_s: float | None = None
    ) -> list[Future[str]]:
        """Send body i to engine i; does not wait. `timeout_s`: where another bound than that of all
        orders holds."""
        bound_s = self.timeout_s if timeout_s is None else timeout_s
        return [
            self._threads.submit(post, engine, path, body, timeout_s=bound_s)
            for engine, body in zip(self.engines, bodies, strict=True)
        ]

    def finish(self, futures: list[Future[str]]) -> list[str]:
        """The answers; or the first failure, at once: a dead engine can keep the others waiting for
        it. Each order is bounded by itself."""
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future in done and (error := future.exception()):
                raise self._first_cause(error)
        return [future.result() for future in futures]

    def _first_cause(self, error: BaseException) -> BaseException:
        """An engine that says that it lost a peer is not the one that died: that one stops
        answering within moments."""
        if not isinstance(error, OrderRefused) or not any(mark in error.why for mark in LOST_PEER):
            return error
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            for engine in self.engines:
                if not _is_alive(engine):
                    return _dead(engine.url, "to take weights", f"{error.what}: {error.why}")
            time.sleep(0.1)
        return error

    def order_all(self, path: str, body: dict[str, Any]) -> list[str]:
        """The same order to all, and their answers."""
        return self.finish(self.begin_all(path, [body] * len(self.engines)))

    def close(self) -> None:
        """Let the threads go; an order that is under way ends by its own bound."""
        self._threads.shutdown(wait=False)
