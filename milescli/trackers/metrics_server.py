"""`/metrics` of a run, for Prometheus, at `run.metrics_address`. Reads nothing that it is sent but
the path, and answers with figures alone. Threads of its own; the run never waits for it."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from milescli.core.errors import MachineError
from milescli.trackers.prometheus import CONTENT_TYPE

KEY = "run.metrics_address"
_PATH = "/metrics"
_CLOSE_S = 2.0
_REQUEST_S = 10.0
"""For one request to be sent."""


class MetricsServer:
    """Serves what `text` gives. Only one can be at an address."""

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        """Raises MachineError where nobody can listen there."""
        family = _family_of(host, port)
        server = type("_Server", (_Server,), {"address_family": family})
        try:
            self._server: Any = server((host, port), _Handler)
        except OSError as error:
            raise _refusal(host, port, error) from error
        self._server.set_app(_app(text))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """As Prometheus and curl take it."""
        host, port = self._server.server_address[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{_PATH}"

    def close(self) -> None:
        """Nobody listens any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLOSE_S)


def require_free(host: str, port: int) -> None:
    """Raises MachineError where nobody can listen there; nobody does afterwards."""
    try:
        with socket.socket(_family_of(host, port), socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
            tried.listen(1)
    except OSError as error:
        raise _refusal(host, port, error) from error


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # WSGIServer's own asks a name server who it is
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked went away; it would be printed on the user's screen."""


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is said of requests."""


def _app(text: Callable[[], str]) -> Callable[..., Iterable[bytes]]:
    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD") or environ["PATH_INFO"] != _PATH:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [f"there is {_PATH} alone\n".encode()]
        body = text().encode()
        headers = [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(body)))]
        start_response("200 OK", headers)
        return [body]

    return app


def _family_of(host: str, port: int) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise _refusal(host, port, error) from error


def _refusal(host: str, port: int, error: OSError) -> MachineError:
    whose = _holder(port) if error.errno == errno.EADDRINUSE else ""
    return MachineError(
        f"nobody can listen at {host}:{port} for `{KEY}`",
        why=f"{error.strerror or error}{whose}",
        fix=[f"--set {KEY}={host}:{port + 1 if port < 65535 else 0}", f"--set {KEY}=null"],
    )


def _holder(port: int) -> str:
    """`; python (process 123) does`, where that can be seen."""
    import psutil

    with suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                return f"; {psutil.Process(one.pid).name()} (process {one.pid}) does"
    return ""
