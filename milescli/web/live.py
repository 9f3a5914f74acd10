"""`live`: announces news of a run, as server-sent events, for as long as the page is open. The page
then requests what it shows; it also does so after it reconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from starlette.types import Message, Receive, Scope, Send

from milescli.checkpoint.run_lock import state_of
from milescli.core.history import History
from milescli.web.asked import Asked
from milescli.web.responses import Busy, Refusal, to_json

POLL_S = 0.5
"""Seconds between two looks at the file."""
HEARTBEAT_S = 10.0
"""Seconds after which something is sent in any case."""
SEND_S = 30.0
"""Longest that a page may take to receive what was sent to it."""
MAX_STREAMS = 64
"""Largest number of open streams."""


def progress(history: History, state: str) -> tuple[object, ...]:
    """Return what is another where the page has something to draw: a step, an evaluation, a notice,
    an end."""
    newest = [one[-1].step for one in (history.evaluations, history.validations) if one]
    warmed = history.warmup.steps[-1] if len(history.warmup) else None
    steps = history.step, history.num_steps, warmed, max(newest, default=None)
    return *steps, len(history.notices), state


class LiveStreams:
    """All streams that are open at a server."""

    def __init__(self) -> None:
        self._num_open = 0
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End all streams."""
        self._closing.set()

    def open(self, asked: Asked, look: Callable[..., Awaitable[bytes]]) -> Stream:
        """Open a stream; `look` calls a function in a thread. Raises Busy where too many are
        open."""
        if self._num_open >= MAX_STREAMS:
            raise Busy(
                "too many pages follow runs of this server",
                why=f"{MAX_STREAMS} streams are open, one for each page",
                fix="close some pages",
            )
        return Stream(asked, look, self)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count one more stream as open within."""
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def closes_within(self, seconds: float) -> bool:
        """Wait for the streams to be ended, at most so long; return whether they are."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()


class Stream:
    """One stream of events: an ASGI application."""

    def __init__(
        self, asked: Asked, look: Callable[..., Awaitable[bytes]], streams: LiveStreams
    ) -> None:
        self._asked, self._look, self._streams = asked, look, streams
        self._history: History | None = None
        self._progress: tuple[object, ...] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the page leaves, or the server ends. A refusal ends the stream: the page asks
        again. Raises a fault of ours."""
        with self._streams.counted():
            sending = asyncio.ensure_future(self._send(_bounded(send)))
            leaving = asyncio.ensure_future(_left(receive))
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
            news = await self._look(self.news)
            if news or silent_s >= HEARTBEAT_S:
                await _body(send, news or b": alive\n\n")
                silent_s = 0.0
            if await self._streams.closes_within(POLL_S):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            silent_s += POLL_S

    def news(self) -> bytes:
        """Return the event of what is new since the last call; empty where nothing is. The history
        is another object where the run's events began anew."""
        with self._asked.history() as history:
            state = state_of(self._asked.run, outcome=history.outcome)
            now = progress(history, state)
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


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
