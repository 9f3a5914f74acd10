"""Manages requests that take long: a client receives an id at once, and requests the result later.
An id is made of what the client counts, so that a request that is sent twice is done once."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from milescli.core.errors import CheckpointError, MilesError, NotFiniteError
from milescli.runtime.service.wire import ClientError

KEEP_S = 900.0
"""Seconds for which a result is kept."""
MAX_OPEN = 4096
"""Largest number of requests of one tenant without a result."""


class Result(Protocol):
    """Defines the result of a request, in the formats of the API."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        ...


@dataclass(frozen=True, slots=True)
class JsonResult:
    """Holds a result that is only JSON."""

    fields: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return self.fields


class Unknown(LookupError):
    """Reports an id that does not belong to this tenant, or whose result was dropped."""


class TooMany(Exception):
    """Reports that a tenant has too many open requests."""


@dataclass(slots=True, kw_only=True)
class _Future:
    tenant: str
    task: asyncio.Task[Result]


@dataclass(slots=True)
class Futures:
    """Holds all requests of a service. Belongs to one event loop."""

    on_fault: Callable[[str], None]
    """Called with a few lines about a fault that was not the client's."""
    num_ended: int = 0
    """Number of requests with a result so far."""
    _all: dict[str, _Future] = field(default_factory=dict)
    _num_open: Counter[str] = field(default_factory=Counter)
    """Number of requests without a result, by tenant."""
    _ended: deque[tuple[float, str]] = field(default_factory=deque)
    """(end, id) of the requests with a result, oldest first."""

    def begin(self, number: str, tenant: str, work: Callable[[], Awaitable[Result]]) -> None:
        """Start the work unless it was started under this id. Raises TooMany, or Unknown if the id
        belongs to another tenant."""
        self._forget()
        if (known := self._all.get(number)) is not None:
            if known.tenant != tenant:
                raise Unknown(number)
            return
        if self._num_open[tenant] >= MAX_OPEN:
            raise TooMany
        made = _Future(tenant=tenant, task=asyncio.ensure_future(self._done(work)))
        made.task.add_done_callback(lambda _: self._end(number, tenant))
        self._all[number] = made
        self._num_open[tenant] += 1

    def _end(self, number: str, tenant: str) -> None:
        self._ended.append((time.monotonic(), number))
        self._num_open[tenant] -= 1
        self.num_ended += 1

    async def result(self, number: str, tenant: str, *, within_s: float) -> Result | None:
        """Return the result; None if it is not ready within the time, or the server ends. Raises
        Unknown."""
        found = self._all.get(number)
        if found is None or found.tenant != tenant:
            raise Unknown(number)
        await asyncio.wait({found.task}, timeout=within_s)
        is_there = found.task.done() and not found.task.cancelled()
        return found.task.result() if is_there else None

    async def close(self) -> None:
        """Cancel the open requests."""
        tasks = [each.task for each in self._all.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _done(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of `work`; a failure is returned as a result, too."""
        try:
            return await work()
        except ClientError as error:
            return _failed(str(error), "user")
        except (NotFiniteError, CheckpointError) as error:
            return _failed(f"{error.what}: {error.why}", "user")
        except MilesError as error:
            self.on_fault(str(error))
            return _failed(error.what, "server")
        except Exception as error:  # a request must not end the others
            self.on_fault(traceback.format_exc())
            return _failed(f"{type(error).__name__} in the server", "server")

    def _forget(self) -> None:
        """Drop results that nobody will ask for."""
        past = time.monotonic() - KEEP_S
        while self._ended and self._ended[0][0] < past:
            del self._all[self._ended.popleft()[1]]


def _failed(text: str, category: str) -> JsonResult:
    return JsonResult({"error": text, "category": category})
