"""A real HTTP server on this machine that replies as a test tells it to: scores, chat completions,
failures, silence. For the rewards `judge` and `remote`, and for evaluations of an endpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass(frozen=True)
class Reply:
    """What is sent back; `silent`: nothing, until the test ends."""

    body: object = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    silent: bool = False


@dataclass
class Asked:
    """One request."""

    path: str
    body: dict[str, Any]
    authorization: str | None


@dataclass
class EndpointServer:
    """Told what to reply by `replies`, a function of the request and of how many came before."""

    replies: Callable[[Asked, int], Reply]
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    at_once: int = 0
    most_at_once: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


def said(text: str) -> Reply:
    """A chat completion."""
    return Reply({"choices": [{"message": {"role": "assistant", "content": text}}]})


@contextmanager
def serving(
    replies: Callable[[Asked, int], Reply], models: Sequence[str] | None = ("tiny",)
) -> Iterator[EndpointServer]:
    """Answers until the block ends; `models`: that it says it has; None: it has no list."""
    state = EndpointServer(replies)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """One request."""
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            asked = Asked(self.path, json.loads(raw), self.headers.get("Authorization"))
            with state.lock:
                number = len(state.asked)
                state.asked.append(asked)
                state.at_once += 1
                state.most_at_once = max(state.most_at_once, state.at_once)
            try:
                reply = state.replies(asked, number)
            finally:  # before it is sent: who has it may ask again at once
                with state.lock:
                    state.at_once -= 1
            self._reply(reply)

        def do_GET(self) -> None:
            """The list of models, the only thing that is not asked with a body."""
            if models is None:
                self._reply(Reply("no such page", status=404))
            else:
                self._reply(Reply({"data": [{"id": name} for name in models]}))

        def _reply(self, reply: Reply) -> None:
            if reply.silent:
                state.ended.wait(timeout=200)
                self.close_connection = True
                return
            text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
            payload = text.encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.ended.set()
        server.shutdown()
        thread.join(timeout=120)
        server.server_close()


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of milliseconds."""
    monkeypatch.setattr("milescli.rollout.endpoint.FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr("milescli.rollout.endpoint.MAX_PAUSE_S", 0.01)
