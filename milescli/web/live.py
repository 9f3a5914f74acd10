"""Implements `live`: announces news of a run, as server-sent events, for as long as the page is
open. The page then requests what it shows; it also does so after it reconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from starlette.types import Message, Receive, Scope, Send

from milescli.checkpoint.run_lock import state_of
from milescli.core.history import History
from milescli.web.responses import Busy, Refusal, to_json
from milescli.web.run_request import RunRequest

POLL_S = 0.5
"""Seconds between two reads of the events file."""
HEARTBEAT_S = 10.0
"""Seconds after which something is sent even without news."""
SEND_S = 30.0
"""Longest time in seconds that a page may take to receive an event."""
MAX_STREAMS = 64
"""Largest number of open streams."""


def progress_state(history: History, state: str) -> tuple[object, ...]:
    """Return a tuple that changes whenever the page has something new to draw: a step, an
    evaluation, a notice, an end; of each adapter, too."""
    newest = [one[-1].step for one in (history.evaluations, history.validations) if one]
    warmed = history.warmup.steps[-1] if len(history.warmup) else None
    steps = history.step, history.num_steps, warmed, max(newest, default=None)
    adapters = (progress_state(own, "") for own in history.adapters.values())
    return *steps, len(history.notices), state, *adapters


class LiveStreams:
    """Holds all open streams of a server."""

    def __init__(self) -> None:
        self._num_open = 0
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End all streams."""
        self._closing.set()

    def open(self, request: RunRequest, look: Callable[..., Awaitable[bytes]]) -> Stream:
        """Open a stream; `look` calls a function in a thread. Raises Busy if too many are open."""
        if self._num_open >= MAX_STREAMS:
            raise Busy(
                "too many pages follow runs of this server",
                why=f"{MAX_STREAMS} streams are open, one for each page",
                fix="close some pages",
            )
        return Stream(request, look, self)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count one more open stream within the context."""
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def wait_closed(self, seconds: float) -> bool:
        """Wait at most `seconds` for `close`. Return True if it was called."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()


class Stream:
    """Sends one stream of events: an ASGI application."""

    def __init__(
        self, request: RunRequest, look: Callable[..., Awaitable[bytes]], streams: LiveStreams
    ) -> None:
        self._request, self._look, self._streams = request, look, streams
        self._history: History | None = None
        self._progress: tuple[object, ...] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the page leaves, or the server ends. A refusal ends the stream: the
        page then requests it again. Raises errors of the server itself."""
        with self._streams.counting():
            sending = asyncio.ensure_future(self._send(_bounded(send)))
            leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                sending.cancel()
                ended, _ = await asyncio.gather(sending, leaving, return_exceptions=True)
        if isinstance(ended, Exception) and not isinstance(ended, Refusal | TimeoutError):
            raise ended

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _body(send, b"retry: 2000\n\n")
        silent_s = 0.0
        while True:
            news = await self._look(self.next_event)
            if news or silent_s >= HEARTBEAT_S:
                await _body(send, news or b": alive\n\n")
                silent_s = 0.0
            if await self._streams.wait_closed(POLL_S):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            silent_s += POLL_S

    def next_event(self) -> bytes:
        """Return the event with the news since the last call; empty if there are none. The history
        is another object if the run's events file was replaced."""
        with self._request.history() as history:
            state = state_of(self._request.run, outcome=history.outcome)
            now = progress_state(history, state)
            if history is self._history and now == self._progress:
                return b""
            self._history, self._progress = history, now
            data = {"step": history.step, "num_steps": history.num_steps, "state": state}
            return b"event: news\ndata: %s\n\n" % to_json(data)


def _bounded(send: Send) -> Send:
    async def sending(message: Message) -> None:
        async with asyncio.timeout(SEND_S):
            await send(message)

    return sending


async def _body(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
