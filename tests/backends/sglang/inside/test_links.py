"""What an engine rank reads by link: ranges at once, again after a failure, never a link's query
in an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from milescli.backends.sglang.inside import links
from milescli.backends.sglang.inside.links import read_links

DATA = bytes(range(256)) * 40
Answer = Callable[[int, int, int], tuple[int, bytes]]
"""(number of the request, first byte, last byte) -> status, body."""


@pytest.fixture(autouse=True)
def small_parts_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PART_BYTES", 1000)
    monkeypatch.setattr(links, "PAUSES_S", (0.0, 0.0))


class Server:
    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.answer: Answer = lambda _, first, last: (206, DATA[first : last + 1])
        server, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                with lock:
                    server.asked.append((first, last))
                    number = len(server.asked)
                status, body = server.answer(number, first, last)
                self.send_response(status)
                self.send_header("Content-Length", str(last - first + 1 if status < 400 else 0))
                self.end_headers()
                if status < 400:
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.link = f"http://127.0.0.1:{self._server.server_port}/bucket/a?Signature=not-for-logs"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_sources_are_read_in_parts_and_joined(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a b").write_bytes(DATA[::-1])
    sources = [(server.link, 0, 2500), ((tmp_path / "a b").as_uri(), 2500, 4000)]
    wire = read_links(sources, size_bytes=4000)
    assert wire.dtype == torch.uint8
    assert wire.numpy().tobytes() == DATA[:2500] + DATA[::-1][:1500]
    assert sorted(server.asked) == [(0, 999), (1000, 1999), (2000, 2499)]
    assert read_links([], size_bytes=0).numel() == 0


def test_what_breaks_off_or_is_refused_for_now_is_asked_again(server: Server) -> None:
    def answer(number: int, first: int, last: int) -> tuple[int, bytes]:
        return (503, b"") if number == 1 else (206, DATA[first : last + 1 - (number == 2)])

    server.answer = answer
    assert read_links([(server.link, 0, 900)], size_bytes=900).numpy().tobytes() == DATA[:900]
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("status", "num_asked", "why"), [(403, 1, "403"), (200, 3, "status 200"), (500, 3, "500")]
)
def test_a_failure_names_the_object_and_not_its_signature(
    server: Server, status: int, num_asked: int, why: str
) -> None:
    server.answer = lambda _, first, last: (status, DATA[first : last + 1])
    with pytest.raises(OSError, match="/bucket/a cannot be read") as caught:
        read_links([(server.link, 0, 900)], size_bytes=900)
    assert why in str(caught.value) and "not-for-logs" not in str(caught.value)
    assert len(server.asked) == num_asked


def test_a_file_that_is_too_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    with pytest.raises(OSError, match="shorter than announced"):
        read_links([((tmp_path / "a").as_uri(), 0, 5)], size_bytes=5)
