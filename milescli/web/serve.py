"""A socket and uvicorn on it, from the first request until Ctrl-C. The key is in no log, no argv
and no file of a run."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import html
import os
import shutil
import signal
import socket
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from milescli.core.errors import MachineError
from milescli.web.app import Site, make_app
from milescli.web.gate import Gate, is_any, is_loopback, new_key
from milescli.web.shown import ShownRuns


def open_page(url: str, *, failed: Callable[[str], None]) -> None:
    """`failed` is told where there is no browser. The file goes at the end of this process."""
    folder = Path(tempfile.mkdtemp(prefix="miles-ui-"))  # 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "open.html"
    quoted = html.escape(url, quote=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(
            '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0;url={quoted}"><a href="{quoted}">miles</a>\n'
        )
    if not webbrowser.open(file.as_uri()):
        failed("no browser opened; open the URL above yourself")


STOP_S = 1
"""Longest that responses may take to end when the server does."""
MAX_CONNECTIONS = 512
"""Open at once, those that follow runs among them; what comes then is refused."""
FORGET_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where a server listens."""

    listener: socket.socket
    gate: Gate

    @property
    def address(self) -> str:
        """Without the key."""
        host = socket.gethostname() if is_any(self.gate.host) else self.gate.host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.gate.port}/"

    @property
    def url(self) -> str:
        """With the key: whoever has it is let in."""
        return f"{self.address}?key={self.gate.key}"

    @property
    def is_loopback(self) -> bool:
        """Return True if only processes of this computer can reach it."""
        return is_loopback(self.gate.host)


def open_door(*, host: str, port: int) -> Door:
    """Listen; 0: any free port. Raises MachineError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
        # connections have it from the listener: asyncio sets it only where it made the socket, and
        # without it a body waits 40 ms for the browser to say that its head came
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError) as error:
        raise _not_opened(host, port, error) from error
    port = listener.getsockname()[1]
    return Door(listener=listener, gate=Gate(key=new_key(), host=host, port=port))


def serve(
    door: Door, shown: ShownRuns, *, fault: Callable[[str], None], ready: Callable[[], None]
) -> None:
    """Until SIGINT or SIGTERM. `ready` is called once before the first request is answered; those
    that come meanwhile wait. `fault` is called with a sentence when something of ours fails."""

    async def serving() -> None:
        server = PageServer(door, Site(shown=shown, fault=fault))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.stop)
        ready()
        await server.serve()

    asyncio.run(serving())


class PageServer:
    """A site behind a door, of one event loop."""

    def __init__(self, door: Door, site: Site) -> None:
        config = uvicorn.Config(
            make_app(site, door.gate),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_S,
            timeout_keep_alive=30,
            limit_concurrency=MAX_CONNECTIONS,
        )
        self._door, self._site, self._server = door, site, _Server(config)

    async def serve(self) -> None:
        """Until `stop`."""
        forgetting = asyncio.ensure_future(_forget(self._site))
        try:
            await self._server.serve(sockets=[self._door.listener])
        finally:
            forgetting.cancel()

    def stop(self) -> None:
        """Called in its event loop: no more is let in, streams end, and it does."""
        self._site.streams.close()
        self._server.should_exit = True


async def _forget(site: Site) -> None:
    while True:
        await asyncio.sleep(FORGET_EVERY_S)
        site.histories.forget_unused()


class _Server(uvicorn.Server):
    """Leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Of none."""
        yield


def _not_opened(host: str, port: int, error: Exception) -> MachineError:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return MachineError(
            f"port {port} of {host} is in use",
            why="another process listens there",
            fix=[f"miles ui --port {port + 1}", "miles ui   # takes a free one"],
        )
    return MachineError(
        f"the page cannot be served at {host}:{port}",
        why=f"{type(error).__name__}: {error}",
        fix=["miles ui   # at 127.0.0.1, on a free port", "ip -brief address   # what there is"],
    )
