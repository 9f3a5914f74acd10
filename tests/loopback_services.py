"""An S3 server (moto) and the metadata services of clouds on loopback, for tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from milescli.platform.ports import free_ports
from tests.waiting import until

BUCKET = "bucket"
needs_s3 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("moto", "s3fs")),
    reason="moto[server] or s3fs is not installed: docker/requirements-dev.txt has both",
)


class S3:
    """A server with one bucket, which forgets all when it is killed."""

    def __init__(self, log: Path) -> None:
        self._log, (self._port,) = log, free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "not-for-any-log",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with its bucket."""
        program = ["from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([sys.executable, "-c", *program], stderr=log)
        until(self._makes_bucket, "the S3 server")

    def _makes_bucket(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self._log.read_text()
        try:
            request = urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")
            return urllib.request.urlopen(request).status == 200
        except OSError:
            return False

    def kill(self) -> None:
        """End it without a word."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """A running server."""
    server = S3(folder / "s3.log")
    server.start()
    try:
        yield server
    finally:
        server.kill()


@dataclass
class Metadata:
    """What a service says, and what it was sent."""

    replies: dict[str, tuple[int, str]] = field(default_factory=dict)
    """`GET /path` -> status and text; what is not there is 404."""
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""


@contextmanager
def metadata_server() -> Iterator[Metadata]:
    """A metadata service."""
    service = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            asked = f"{self.command} {self.path.partition('?')[0]}"
            service.seen.append((asked, {k.lower(): v for k, v in self.headers.items()}))
            status, text = service.replies.get(asked, (404, ""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _reply

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
