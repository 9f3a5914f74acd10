"""Batches requests that are made at the same moment, and returns each response when it is complete.
Engines get equal shares. Knows nothing of sampling; used by the fleet.

An engine's HTTP server spends a millisecond of Python on each call. A step's samples start at one
moment, so a call carries many of them; the engine then also prefills them in one batch.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from milescli.backends.sglang.client.admission import REFILL, Admission, Load
from milescli.backends.sglang.client.http import RETRY_WAITS_S, ConnectionBroken

MAX_BATCH = 32
"""Largest number of requests in one call: each time one of them has output, SGLang checks all that
are open."""
ONLY_WHEN_DONE = 2**30
"""Tokens between two chunks of a response: so many that it is sent as a whole (after its first
token, if `cpu.streams` is not installed)."""

MAX_HOMES = 8192
"""Number of conversations whose engine is remembered; older ones may go to any engine."""

LOAD_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of an engine while requests are held back, or its cache is short."""

Stream = Callable[[dict[str, Any], float], AsyncGenerator[dict[str, Any]]]
"""(body of /generate, seconds) -> what the engine streams; as `EngineHttp.stream`."""
OnPart = Callable[[dict[str, Any]], None]
"""Receives the reply so far, every few tokens."""
MAX_PARTS = 512
"""Largest number of parts of one reply: each holds all tokens so far."""
ReadLoad = Callable[[str], Awaitable[Load | None]]
"""URL of an engine -> its current load; None if the engine does not report it."""


class NotSent(Exception):
    """Returns a request to its caller, because it was not sent to an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """Holds one request of a call."""

    body: dict[str, Any]
    deadline: float
    reply: asyncio.Future[dict[str, Any]]
    conversation: int | None
    on_part: OnPart | None


@dataclass(eq=False, slots=True)
class _Engine:
    """Holds one engine that accepts requests."""

    url: str
    stream: Stream
    admission: Admission
    num_open: int = 0
    """Number of requests that wait for their replies."""
    is_closed: bool = False
    """True while its weights change: it gets no requests."""
    next_check_s: float = 0.0
    """Earliest time.monotonic of the next check of its load."""
    calls: dict[asyncio.Task[None], list[_Request]] = field(default_factory=dict)

    @property
    def num_spare(self) -> int:
        """Return how many more requests the engine may get."""
        return 0 if self.is_closed else self.admission.num_spare(self.num_open)


async def _no_load(_: str) -> None:
    """Report no load, for engines whose load is not checked."""


class RequestBatcher:
    """Batches the requests of one round of the event loop, to which it belongs."""

    def __init__(
        self,
        streams: Mapping[str, Stream],
        *,
        max_running: int | None = None,
        read_load: ReadLoad = _no_load,
    ) -> None:
        """Send requests over `streams`, one per engine, by its URL. `max_running`: requests that an
        engine can run at once; None: it gets all of them at once."""
        self._max_running = max_running
        self._read_load, self._load_tasks = read_load, set[asyncio.Task[None]]()
        self._engines = dict[str, _Engine]()
        self._engines = {
            url: _Engine(url, stream, Admission(max_running)) for url, stream in streams.items()
        }
        self._waiting: list[_Request] = []
        """Asked in this turn of the event loop, after those that are held back."""
        self._is_sending = False
        """They will be sent in a moment."""
        self._num_retractions = self._most_held = 0
        self._homes: dict[int, str] = {}
        """Conversation -> URL of the engine that was asked its last turn; the oldest first."""
        self._no_engine: Exception = AssertionError("the request has no engine")

    def add(self, url: str, stream: Stream) -> None:
        """Add an engine, which gets its share of later requests."""
        self._engines[url] = _Engine(url, stream, Admission(self._max_running))
        self._send_soon()

    def remove(self, url: str, error: Exception) -> None:
        """Remove an engine. Its open requests raise `error`, as do requests that find no other
        engine."""
        self._no_engine = error
        engine = self._engines.pop(url)
        for call, requests in list(engine.calls.items()):
            _fail(requests, error)
            call.cancel()
        self._send_soon()

    def close_to(self, url: str, *, is_closed: bool) -> None:
        """Stop sending to the engine at this URL, or start again."""
        if url in self._engines:
            self._engines[url].is_closed = is_closed
            self._send_soon()

    def num_open(self, url: str) -> int:
        """Return the number of requests that wait for replies of this engine."""
        return self._engines[url].num_open if url in self._engines else 0

    async def ask(
        self,
        body: dict[str, Any],
        *,
        timeout_s: float,
        conversation: int | None = None,
        on_part: OnPart | None = None,
    ) -> dict[str, Any]:
        """Return the whole reply to one /generate with `input_ids` and `sampling_params`.
        `conversation` identifies the dialogue whose next turn it is. `on_part` receives the parts
        before the whole reply. Raises what the stream raises."""
        reply = asyncio.get_running_loop().create_future()
        deadline = time.monotonic() + timeout_s
        self._waiting.append(
            _Request(
                body=body,
                deadline=deadline,
                reply=reply,
                conversation=conversation,
                on_part=on_part,
            )
        )
        self._send_soon()
        return await reply

    def return_unsent(self) -> int:
        """Raise NotSent for all requests that were not sent yet; return their number."""
        waiting, self._waiting = self._waiting, []
        waiting = [request for request in waiting if not request.reply.done()]
        _fail(waiting, NotSent())
        return len(waiting)

    def pressure(self) -> tuple[int, int]:
        """Return (how often engines discarded the cache of a request, largest number of requests
        held back) since the last call."""
        found = self._num_retractions, self._most_held
        self._num_retractions, self._most_held = 0, len(self._waiting)
        return found

    async def close(self) -> None:
        """Cancel open requests."""
        calls = [call for engine in self._engines.values() for call in engine.calls]
        for call in (*calls, *self._load_tasks):
            call.cancel()
        await asyncio.gather(*calls, *self._load_tasks, return_exceptions=True)

    def _send_soon(self) -> None:
        if self._waiting and not self._is_sending:
            self._is_sending = True
            asyncio.get_running_loop().call_soon(self._send_all)

    def _send_all(self) -> None:
        self._is_sending = False
        waiting = [request for request in self._waiting if not request.reply.done()]
        self._waiting = []
        if not self._engines:
            return _fail(waiting, self._no_engine)
        for engine, requests in self._shares(waiting):
            engine.num_open += len(requests)
            call = asyncio.ensure_future(self._call(requests, engine))
            engine.calls[call] = requests
            call.add_done_callback(engine.calls.pop)
            for request in requests:
                request.reply.add_done_callback(lambda _, c=call, r=requests: _end_unwanted(c, r))
                request.reply.add_done_callback(lambda reply, e=engine: self._replied(e, reply))
                self._note_home(request, engine)
        self._most_held = max(self._most_held, len(self._waiting))
        for engine in self._engines.values() if self._waiting else ():
            self._update_load(engine)
        return None

    def _replied(self, engine: _Engine, reply: asyncio.Future[dict[str, Any]]) -> None:
        """Update the counts after a reply, and note how often the engine discarded its cache."""
        engine.num_open -= 1
        if not reply.cancelled() and reply.exception() is None:
            num = reply.result()["meta_info"].get("num_retractions") or 0
            self._num_retractions += num
            engine.admission.num_retractions += num
            if num:
                self._update_load(engine)
        if engine.num_spare >= REFILL or not engine.num_open:
            self._send_soon()

    def _update_load(self, engine: _Engine) -> None:
        if self._max_running is None or time.monotonic() < engine.next_check_s:
            return
        engine.next_check_s = time.monotonic() + LOAD_CHECK_INTERVAL_S

        async def read_load() -> None:
            if (load := await self._read_load(engine.url)) is not None:
                engine.admission.adapt(load)
                self._send_soon()

        task = asyncio.ensure_future(read_load())
        self._load_tasks.add(task)
        task.add_done_callback(self._load_tasks.discard)

    def _shares(self, waiting: list[_Request]) -> Iterator[tuple[_Engine, list[_Request]]]:
        """Choose the requests of each engine. The next turn of a conversation goes to the engine
        that caches its beginning, unless that has a whole call more than another. The others are
        distributed in equal shares to the engines with the fewest requests, as far as they can take
        more; the remaining requests are held back. While every engine is busy, up to `REFILL`
        requests stay together: samples of one prompt then share its cache. Each share counts as
        open before the next is chosen."""
        open_ = [engine for engine in self._engines.values() if not engine.is_closed]
        least = min((engine.num_open for engine in open_), default=0)
        at_home, others = defaultdict[str, list[_Request]](list), list[_Request]()
        for request in waiting:
            url = self._homes.get(request.conversation or 0)
            engine = self._engines.get(url) if url else None
            is_open = engine is not None and not engine.is_closed
            if is_open and engine.num_open + len(at_home[engine.url]) < least + MAX_BATCH:
                at_home[engine.url].append(request)
            else:
                others.append(request)
        for url, requests in at_home.items():
            for start in range(0, len(requests), MAX_BATCH):
                yield self._engines[url], requests[start : start + MAX_BATCH]
        share = -(-len(others) // max(1, len(open_)))
        size, start = min(MAX_BATCH, max(share, REFILL if least >= REFILL else 0)), 0
        while start < len(others):
            engine = min(open_, key=lambda engine: engine.num_open, default=None)
            if engine is not None and not engine.num_spare:  # another may run more
                engine = max(open_, key=lambda engine: engine.num_spare)
            if engine is None or not engine.num_spare:
                self._waiting = others[start:]
                return
            count = min(size, engine.num_spare)
            yield engine, others[start : start + count]
            start += count

    def _note_home(self, request: _Request, engine: _Engine) -> None:
        if request.conversation is not None:
            self._homes.pop(request.conversation, None)
            self._homes[request.conversation] = engine.url
            if len(self._homes) > MAX_HOMES:
                del self._homes[next(iter(self._homes))]

    async def _call(self, requests: list[_Request], engine: _Engine) -> None:
        """Send the requests until each has its reply or its error. After a broken connection, open
        requests are sent again; nothing is lost, because equal seeds give equal tokens."""
        try:
            for wait_s in (*RETRY_WAITS_S, None):
                left = [request for request in requests if not request.reply.done()]
                try:
                    return await self._exchange(left, engine)
                except ConnectionBroken:
                    if wait_s is None:
                        raise
                    await asyncio.sleep(wait_s)
        except Exception as error:  # whatever it was, those who wait must learn of it
            _fail(requests, error)
        finally:
            for request in requests:
                request.reply.cancel()

    async def _exchange(self, requests: list[_Request], engine: _Engine) -> None:
        timeout_s = max(request.deadline for request in requests) - time.monotonic()
        stream = engine.stream(_joined(requests), max(timeout_s, 0.001))
        async with aclosing(stream) as parts:
            async for part in parts:
                request = requests[part["index"]]
                if request.reply.done():
                    continue
                if part["meta_info"]["finish_reason"] is not None:
                    request.reply.set_result(part)
                elif request.on_part is not None:
                    request.on_part(part)
        if silent := sum(not request.reply.done() for request in requests):
            raise ConnectionBroken(
                f"an engine ended a reply after {silent} of {len(requests)} responses",
                why="the stream ended normally without them",
                fix="read the engine's log",
            )


def _fail(requests: list[_Request], error: Exception) -> None:
    for request in requests:
        if not request.reply.done():
            request.reply.set_exception(error)


def _end_unwanted(call: asyncio.Task[None], requests: list[_Request]) -> None:
    """Close the connection if a caller has cancelled and no other request is open, so that the
    engine aborts the rest. If every reply has arrived, the stream ends by itself."""
    replies = [request.reply for request in requests]
    if all(reply.done() for reply in replies) and any(reply.cancelled() for reply in replies):
        call.cancel()


def _joined(requests: list[_Request]) -> dict[str, Any]:
    """Return one body for several requests: fields that differ become lists, the others are equal
    in all."""
    first = requests[0].body
    named = any("rid" in request.body for request in requests)
    images = [request.body.get("image_data", []) for request in requests]
    return first | {
        **({"rid": [request.body.get("rid", "") for request in requests]} if named else {}),
        "input_ids": [request.body["input_ids"] for request in requests],
        "sampling_params": [
            request.body["sampling_params"] | {"stream_interval": _interval(request)}
            for request in requests
        ],
        "stream": True,
        **({"image_data": images} if any(images) else {}),
    }


def _interval(request: _Request) -> int:
    """Return the tokens between two parts of a reply."""
    if request.on_part is None:
        return ONLY_WHEN_DONE
    return max(1, request.body["sampling_params"]["max_new_tokens"] // MAX_PARTS)
