"""Opens a socket and runs uvicorn on it until Ctrl-C. The key is in no log, no argv and no file of
a run; the user's own key is in a file that only they can read."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import html
import os
import re
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
from milescli.web.control import Control
from milescli.web.gate import Gate, is_any, is_loopback, new_key
from milescli.web.shown import ShownRuns


def open_page(url: str, *, failed: Callable[[str], None]) -> None:
    """Open the URL in a browser, through a private file that is removed when this process ends.
    Calls `failed` if no browser opens."""
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
"""Longest that open responses may take once the server stops."""
MAX_CONNECTIONS = 512
"""Most open connections, including those that follow runs; further ones are refused."""
FORGET_EVERY_S = 60.0
DEFAULT_PORT = 8420
"""Fixed, so that a bookmark still works after the server restarts."""
KEY_FILE = "ui-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSocket:
    """Holds the socket and the gate of a server."""

    listener: socket.socket
    gate: Gate

    @property
    def address(self) -> str:
        """Return the URL without the key."""
        return f"{address_of(self.gate.host, self.gate.port)}/"

    @property
    def url(self) -> str:
        """Return the URL with the key, which admits anybody who has it."""
        return f"{self.address}?key={self.gate.key}"

    @property
    def is_loopback(self) -> bool:
        """Return True if only processes of this computer can reach it."""
        return is_loopback(self.gate.host)


def open_page_socket(
    *, host: str, port: int | None, state: Path | None = None, can_control: bool = False
) -> PageSocket:
    """Listen on a port; 0: any free one; None: the usual one, or a free one if that is in use. On
    loopback the key is the user's own, kept in the folder `state` if there is one; elsewhere it is
    new. Raises MachineError."""
    listener = listen(host, port, usual=DEFAULT_PORT, command="miles ui")
    number = listener.getsockname()[1]
    key = None
    if state is not None and is_loopback(host):
        # whoever listens at the usual port may have been sent the key by a bookmark
        is_known = number != DEFAULT_PORT and _listens(DEFAULT_PORT) not in (None, os.getuid())
        key = user_key(state, is_new=is_known)
    gate = Gate(
        key=key or new_key(),
        host=host,
        port=number,
        is_permanent=key is not None,
        can_control=can_control,
    )
    return PageSocket(listener=listener, gate=gate)


def address_of(host: str, port: int) -> str:
    """Return http://HOST:PORT, by this computer's name if `host` is every address."""
    name = socket.gethostname() if is_any(host) else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def listen(host: str, port: int | None, *, usual: int, command: str) -> socket.socket:
    """Listen on a port; 0: any free one; None: the `usual` one, or a free one if that is in use.
    `command`: what the user typed, for fixes. Raises MachineError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        try:
            wanted = usual if port is None else port
            listener = socket.create_server((host, wanted), family=family, backlog=128)
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise
            listener = socket.create_server((host, 0), family=family, backlog=128)
        # connections have it from the listener: asyncio sets it only where it made the socket, and
        # without it a body waits 40 ms for the browser to say that its head came
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError) as error:
        raise _not_opened(host, port or 0, error, command=command) from error
    return listener


def _listens(port: int) -> int | None:
    """Return the user id of the process that listens on a port here; None if none is found."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == "0A" and int(parts[1].rpartition(":")[2], 16) == port:
                    return int(parts[7])
    return None


def user_key(state: Path, *, is_new: bool = False) -> str | None:
    """Return the user's key. It is created if it is missing, if `is_new`, or if others could have
    read it. Returns None if the folder is not writable."""
    file = state / KEY_FILE
    with contextlib.suppress(OSError):
        number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(number, encoding="ascii", errors="replace") as opened:
            status = os.fstat(number)
            is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077
            text = opened.read(200).strip()
            if is_private and not is_new and re.fullmatch(r"[\w-]{20,64}", text):
                return text
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = state / f".{KEY_FILE}-{os.getpid()}"
        fresh.unlink(missing_ok=True)
        key = new_key()
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
            written.write(f"{key}\n")
        fresh.replace(file)
    except OSError:
        return None
    return key


def serve(
    page_socket: PageSocket,
    shown: ShownRuns,
    *,
    on_fault: Callable[[str], None],
    ready: Callable[[], None],
) -> None:
    """Serve the page until SIGINT or SIGTERM. `ready` is called once before the first request is
    answered; earlier requests wait. `on_fault` receives a sentence if the server itself fails."""

    async def serving() -> None:
        control = Control() if page_socket.gate.can_control else None
        server = PageServer(page_socket, Site(shown=shown, on_fault=on_fault, control=control))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.stop)
        ready()
        await server.serve()

    asyncio.run(serving())


class PageServer:
    """Serves a site on a socket; belongs to one event loop."""

    def __init__(self, page_socket: PageSocket, site: Site) -> None:
        config = uvicorn.Config(
            make_app(site, page_socket.gate),
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
        self._door, self._site, self._server = page_socket, site, _Server(config)

    async def serve(self) -> None:
        """Serve until `stop`."""
        forgetting = asyncio.ensure_future(_forget(self._site))
        try:
            await self._server.serve(sockets=[self._door.listener])
        finally:
            forgetting.cancel()
            if self._site.control is not None:
                self._site.control.close()

    def stop(self) -> None:
        """Accept no more requests, end the streams, and let `serve` return. Called in its event
        loop."""
        self._site.streams.close()
        self._server.should_exit = True


async def _forget(site: Site) -> None:
    while True:
        await asyncio.sleep(FORGET_EVERY_S)
        site.histories.drop_unused()
        if site.control is not None:
            site.control.drop_unused()


class _Server(uvicorn.Server):
    """Runs uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def _not_opened(host: str, port: int, error: Exception, *, command: str) -> MachineError:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return MachineError(
            f"port {port} of {host} is in use",
            why="another process listens there",
            fix=[f"{command} --port {port + 1}", f"{command}   # takes a free one"],
        )
    return MachineError(
        f"{host}:{port} cannot be served",
        why=f"{type(error).__name__}: {error}",
        fix=[f"{command}   # at 127.0.0.1, on a free port", "ip -brief address   # what there is"],
    )
