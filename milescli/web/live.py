"""`live`: what a run tells as it happens, as server-sent events, for as long as the page is open. A
page that lost the connection goes on behind what it saw last (`Last-Event-ID`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass

from starlette.types import Message, Receive, Scope, Send

from milescli.checkpoint.run_lock import state_of
from milescli.core.history import History
from milescli.web.asked import Asked
from milescli.web.responses import Busy, Refusal, to_json

POLL_S = 0.5
"""Between looks at the file."""
HEARTBEAT_S = 10.0
"""After which something is sent in any case."""
SEND_S = 30.0
"""Longest that a page may take to receive what was sent to it."""
MAX_STREAMS = 64
"""Open at once."""
MAX_NOTICES = 500
"""Of a backlog, the newest."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a page was sent so far."""

    history: History | None = None
    """The one that it is of: another object where the file began anew."""
    notices: int | None = None
    """Entries of its list; None: it has yet to be seen how many there are."""
    progress: tuple[int | None, ...] | None = None
    """Step, number of steps, and how much was measured beside the steps."""
    outcome: str | None = None


def changes(history: History, state: str, seen: Seen) -> list[bytes]:
    """Return the events that the page has not been sent yet, and mark them as sent. The first call
    sends only how far the run is: the page asks for earlier notices at `notices`."""
    events = list[bytes]()
    if seen.history is not history:
        if seen.history is not None:
            events.append(_event("reset", {"why": "the run's events began anew"}))
            seen.notices, seen.progress, seen.outcome = 0, None, None
        seen.history = history
    if seen.notices is None or seen.notices > len(history.notices):
        seen.notices = len(history.notices)
    for number in range(
        max(seen.notices, len(history.notices) - MAX_NOTICES), len(history.notices)
    ):
        events.append(_event("notice", asdict(history.notices[number]), number=number + 1))
    seen.notices = len(history.notices)
    if (progress := _progress(history)) != seen.progress:
        seen.progress = progress
        step = {"step": history.step, "num_steps": history.num_steps}
        events.append(_event("step", step, number=seen.notices))
    outcome = None if state in ("not started", "running") else state
    if outcome != seen.outcome:
        seen.outcome = outcome
        if outcome is not None:
            events.append(_event("end", {"outcome": outcome}, number=seen.notices))
    return events


def _progress(history: History) -> tuple[int | None, ...]:
    newest = [one[-1].step for one in (history.evaluations, history.validations) if one]
    warmed = history.warmup.steps[-1] if len(history.warmup) else None
    return history.step, history.num_steps, warmed, max(newest, default=None)


class LiveStreams:
    """All streams that are open at a server."""

    def __init__(self) -> None:
        self._num_open = 0
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End all streams."""
        self._closing.set()

    def open(self, asked: Asked, look: Callable[..., Awaitable[list[bytes]]]) -> Stream:
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
        self, asked: Asked, look: Callable[..., Awaitable[list[bytes]]], streams: LiveStreams
    ) -> None:
        self._asked, self._look, self._streams = asked, look, streams
        self._seen = Seen(notices=asked.question.number("notices"))

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
            events = await self._look(self._changes)
            if events or silent_s >= HEARTBEAT_S:
                await _body(send, b"".join(events) or b": alive\n\n")
                silent_s = 0.0
            if await self._streams.closes_within(POLL_S):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            silent_s += POLL_S

    def _changes(self) -> list[bytes]:
        with self._asked.history() as history:
            state = state_of(self._asked.run, outcome=history.outcome)
            return changes(history, state, self._seen)


def _event(name: str, value: object, *, number: int = 0) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (number, name.encode(), to_json(value))


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
