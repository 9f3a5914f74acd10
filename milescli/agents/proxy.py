"""Serves sessions over HTTP, for agents that call a model by URL: OpenAI's and Anthropic's formats,
and one of token ids. One server runs in the driver's event loop, with a key for each session; what
it samples is recorded like the session's own calls. It listens on loopback, except if `miles serve`
says otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive

from milescli.agents import anthropic_forms, openai_forms, responses_form
from milescli.agents.openai_forms import Choice, ModelRequest
from milescli.agents.responses_form import ResponsesRequest, StoredResponses, UnknownResponse
from milescli.core.errors import AgentError, ContextFull, MilesError
from milescli.core.files import parse_json
from milescli.data.tokenizer import ChatTokenizer
from milescli.rollout.base import Session, SessionAddress

if TYPE_CHECKING:
    from milescli.rollout.episode.session import RecordingSession
    from milescli.rollout.episode.text_pieces import OnPiece

MAX_BODY_BYTES = 64 * 1024**2
MAX_OPEN = 256
"""Largest number of open requests of one session, unless each request has a session of its own."""
STOP_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _ServedSession:
    """Holds a session that is served, with its open requests."""

    session: Session
    open: set[asyncio.Future[Any]] = field(default_factory=set)
    """Requests that have no response yet."""
    kept: StoredResponses = field(default_factory=StoredResponses)
    """Responses that a later `/v1/responses` request can continue from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResponseForm:
    """Describes how to respond to a request for messages."""

    tell: Callable[[Sequence[Choice]], openai_forms.Json]
    """Returns the whole response."""
    events: _Events


class _Events(Protocol):
    """Writes the server-sent events of one response."""

    def piece(self, part: str, text: str) -> Iterator[str]:
        """Yield the events for a piece of one part of the message."""
        ...

    def end(self, response: openai_forms.Json) -> Iterator[str]:
        """Yield the events for the rest of the response."""
        ...

    def failed(self, message: str) -> Iterator[str]:
        """Yield the event that ends the stream with an error."""
        ...


_Respond = Callable[[Any, _ServedSession, str], Awaitable[Response]]


@dataclass(slots=True, kw_only=True)
class SessionProxy:
    """Implements milescli.rollout.base.SessionServer. Belongs to one event loop, and listens from
    the first `open` until the loop ends."""

    tokenizer: ChatTokenizer
    model: str
    """Name of the served model; requests may use any name."""
    max_model_len: int
    """Largest number of tokens of a conversation."""
    host: str = "127.0.0.1"
    listener: socket.socket | None = None
    """Socket to listen on; None: a free port of `host`."""
    session_of: Callable[[ModelRequest], RecordingSession] | None = None
    """Makes a session for each request, so that its chat can be streamed token by token; None: all
    requests with one key belong to one session."""
    _guests: dict[str, _ServedSession] = field(default_factory=dict)
    _numbers: count = field(default_factory=count)  # type: ignore[type-arg]
    _server: uvicorn.Server | None = None
    _serving: asyncio.Task[None] | None = None
    _port: int = 0

    def _start(self) -> None:
        """Start the server."""
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/responses", self._responses, methods=["POST"]),
            Route("/v1/completions", self._text, methods=["POST"]),
            Route("/v1/messages", self._messages, methods=["POST"]),
            Route("/inference/v1/generate", self._ids, methods=["POST"]),
        ]
        listener = self.listener or socket.create_server((self.host, 0), backlog=2048)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = QuietServer(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        """Stop serving."""
        self._guests.clear()
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._serving

    @property
    def num_open(self) -> int:
        """Return the number of requests that have no response yet."""
        return sum(len(guest.open) for guest in self._guests.values())

    def open(self, session: Session) -> SessionAddress:
        """Serve the session from now on."""
        if self._server is None:
            self._start()
        key = secrets.token_urlsafe(32)
        self._guests[key] = _ServedSession(session)
        return SessionAddress(base_url=f"http://{self.host}:{self._port}/v1", api_key=key)

    def close(self, address: SessionAddress) -> None:
        """Stop serving the session."""
        guest = self._guests.pop(address.api_key, None)
        for waiting in guest.open if guest is not None else ():
            waiting.cancel()

    async def _models(self, request: Request) -> Response:
        if self._guest(request) is None:
            return _REFUSED
        return JSONResponse(openai_forms.models(self.model, max_model_len=self.max_model_len))

    async def _chat(self, request: Request) -> Response:
        def begin(parsed: ModelRequest, guest: _ServedSession, number: str) -> _ResponseForm:
            named = {"model": self.model, "number": number}
            return _ResponseForm(
                tell=lambda answered: openai_forms.chat_response(parsed, answered, **named),
                events=openai_forms.ChatEvents(**named, wants_usage=parsed.wants_usage),
            )

        return await self._handle(
            request, _without_guest(openai_forms.parse_chat_request), self._message_handler(begin)
        )

    async def _responses(self, request: Request) -> Response:
        def read(body: dict[str, Any], guest: _ServedSession) -> ResponsesRequest:
            return responses_form.parse_responses_request(body, guest.kept)

        def begin(parsed: ResponsesRequest, guest: _ServedSession, number: str) -> _ResponseForm:
            named = {"model": self.model, "number": number}

            def tell(answered: Sequence[Choice]) -> openai_forms.Json:
                (answer,) = answered
                respond = responses_form.response(parsed, answer, **named)
                if parsed.is_stored and answer.reply is not None:
                    guest.kept.add(respond["id"], [*parsed.history, dict(answer.reply.message)])
                return respond

            return _ResponseForm(tell=tell, events=responses_form.ResponseEvents(parsed, **named))

        return await self._handle(request, read, self._message_handler(begin))

    async def _messages(self, request: Request) -> Response:
        def begin(parsed: ModelRequest, guest: _ServedSession, number: str) -> _ResponseForm:
            named = {"model": self.model, "number": number}
            return _ResponseForm(
                tell=lambda answered: anthropic_forms.message_response(answered[0], **named),
                events=anthropic_forms.MessageEvents(**named),
            )

        return await self._handle(
            request,
            _without_guest(anthropic_forms.parse_messages_request),
            self._message_handler(begin),
        )

    def _message_handler(
        self, begin: Callable[[Any, _ServedSession, str], _ResponseForm]
    ) -> _Respond:
        """Return the handler of a request for messages; it responds as a whole or with events."""

        async def respond(parsed: ModelRequest, guest: _ServedSession, number: str) -> Response:
            form = begin(parsed, guest, number)
            if parsed.streams:
                return await self._stream_response(parsed, guest, form)
            return JSONResponse(form.tell(await self._sample_replies(parsed, guest.session)))

        return respond

    async def _stream_response(
        self, parsed: ModelRequest, guest: _ServedSession, form: _ResponseForm
    ) -> Response:
        """Return the streaming response once the first piece exists, or at the end if there are no
        pieces; a failure before that sets the HTTP status."""
        pieces = asyncio.Queue[tuple[str, str] | None]()
        sampling = asyncio.ensure_future(
            self._sample_replies(
                parsed, guest.session, on_piece=lambda *piece: pieces.put_nowait(piece)
            )
        )
        sampling.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            first = await pieces.get()
        except BaseException:
            sampling.cancel()
            raise
        if first is None:
            events = form.events.end(form.tell(sampling.result()))
            return StreamingResponse(events, media_type="text/event-stream")
        guest.open.add(sampling)
        sampling.add_done_callback(guest.open.discard)

        async def rest(piece: tuple[str, str] | None) -> AsyncIterator[str]:
            try:
                while piece is not None:
                    for event in form.events.piece(*piece):
                        yield event
                    piece = await pieces.get()
                for event in _last_events(sampling, form):
                    yield event
            finally:
                sampling.cancel()

        return StreamingResponse(rest(first), media_type="text/event-stream")

    async def _text(self, request: Request) -> Response:
        async def respond(parsed: ModelRequest, guest: _ServedSession, number: str) -> Response:
            answered = await self._sample_turns(parsed, guest.session)
            told = openai_forms.text_response(parsed, answered, model=self.model, number=number)
            return JSONResponse(told)

        return await self._handle(
            request, _without_guest(openai_forms.parse_completion_request), respond
        )

    async def _ids(self, request: Request) -> Response:
        async def respond(parsed: ModelRequest, guest: _ServedSession, number: str) -> Response:
            answered = await self._sample_turns(parsed, guest.session)
            return JSONResponse(openai_forms.ids_response(answered, number=number))

        return await self._handle(
            request, _without_guest(openai_forms.parse_token_request), respond
        )

    async def _sample_replies(
        self, parsed: ModelRequest, session: Session, *, on_piece: OnPiece | None = None
    ) -> list[Choice]:
        """Return the choices of a chat. `on_piece` receives the pieces of an only choice, if each
        request has its own session."""
        chat = session.chat
        if self.session_of is not None:
            own = self.session_of(parsed)
            is_told = on_piece is not None and parsed.num_choices == 1
            chat = partial(own.chat, on_piece=on_piece) if is_told else own.chat
        replies = await asyncio.gather(
            *(
                chat(
                    parsed.messages,
                    tools=parsed.tools,
                    max_new_tokens=parsed.max_new_tokens,
                    stop=parsed.stop,
                )
                for _ in range(parsed.num_choices)
            )
        )
        return [
            Choice(turn=reply.turn, reply=reply, pieces=self._pieces(parsed, reply.turn))
            for reply in replies
        ]

    async def _sample_turns(self, parsed: ModelRequest, session: Session) -> list[Choice]:
        if self.session_of is not None:
            session = self.session_of(parsed)
        prompt = parsed.prompt
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode_text(prompt)
        turns = await asyncio.gather(
            *(
                session.generate(prompt, max_new_tokens=parsed.max_new_tokens, stop=parsed.stop)
                for _ in range(parsed.num_choices)
            )
        )
        return [Choice(turn=turn, pieces=self._pieces(parsed, turn)) for turn in turns]

    def _pieces(self, parsed: ModelRequest, turn: Any) -> Sequence[str]:
        return self.tokenizer.pieces(turn.response_ids) if parsed.wants_logprobs else ()

    def _guest(self, request: Request) -> _ServedSession | None:
        """Return the served session whose key the request has."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")  # Anthropic's
        return self._guests.get(key.strip())

    async def _handle(
        self,
        request: Request,
        read: Callable[[dict[str, Any], _ServedSession], ModelRequest],
        respond: _Respond,
    ) -> Response:
        """Return the response, or an error that says what is wrong with the request."""
        guest = self._guest(request)
        if guest is None:
            return _REFUSED
        if self.session_of is None and len(guest.open) >= MAX_OPEN:
            return _error_response(429, f"a session has at most {MAX_OPEN} open requests")
        try:
            parsed = read(as_object(await read_body(request)), guest)
            response = respond(parsed, guest, f"{next(self._numbers):08x}")
            return await self._while_awaited(request, guest, response)
        except ContextFull as error:
            return _error_response(400, error.why, code="context_length_exceeded")
        except UnknownResponse as error:
            return _error_response(400, str(error), code="previous_response_not_found")
        except (AgentError, ValueError) as error:
            return _error_response(400, getattr(error, "why", str(error)))
        except TooLarge:
            return _error_response(413, f"a request has at most {MAX_BODY_BYTES:,} bytes")
        except MilesError as error:
            return _error_response(503, str(error), kind="server_error")

    async def _while_awaited(
        self, request: Request, guest: _ServedSession, response: Awaitable[Response]
    ) -> Response:
        """Return the response, or an error if the client leaves or the session is closed first:
        what nobody receives is not sampled to its end, and so is not recorded."""
        waiting = asyncio.ensure_future(response)
        leaving = asyncio.ensure_future(_wait_for_disconnect(request.receive))
        guest.open.add(waiting)
        try:
            await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.cancelled():
                return _error_response(503, "the session has ended", kind="server_error")
            if not waiting.done():
                return _error_response(499, "the client has left")
            return waiting.result()
        finally:
            guest.open.discard(waiting)
            waiting.cancel()
            leaving.cancel()


class QuietServer(uvicorn.Server):
    """Runs uvicorn's server without its signal handlers, which the driver has."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Capture no signals."""
        yield


class TooLarge(Exception):
    """Reports that a request has too many bytes."""


def _last_events(sampling: asyncio.Future[list[Choice]], form: _ResponseForm) -> Iterator[str]:
    """Return the events for the rest of a response, or the error that ended it."""
    if sampling.cancelled():
        return form.events.failed("the session has ended")
    error = sampling.exception()
    if error is None:
        return form.events.end(form.tell(sampling.result()))
    if isinstance(error, MilesError):
        return form.events.failed(str(error))
    raise error


def _without_guest(
    read: Callable[[dict[str, Any]], ModelRequest],
) -> Callable[[dict[str, Any], _ServedSession], ModelRequest]:
    """Adapt a parser that does not need the guest."""
    return lambda body, guest: read(body)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request) -> bytes:
    """Return the body of a request. Raises TooLarge beyond MAX_BODY_BYTES."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise TooLarge
    return bytes(data)


def as_object(data: bytes) -> dict[str, Any]:
    """Parse a body. Raises ValueError if it is not a JSON object."""
    try:
        body = parse_json(data)
    except ValueError as error:
        raise ValueError(f"the request is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("the request is not a JSON object")
    return body


def _error_response(
    status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None
) -> JSONResponse:
    return JSONResponse(openai_forms.error(message, kind=kind, code=code), status_code=status)


_REFUSED = _error_response(401, "no open session has this key", kind="authentication_error")
