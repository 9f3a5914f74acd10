"""A page's server in the tests: the app alone, or behind a real socket in a thread, ended as Ctrl-C
ends it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from starlette.testclient import TestClient

from milescli.web.app import Site, make_app
from milescli.web.gate import Gate
from milescli.web.serve import PageServer, PageSocket, open_page_socket
from milescli.web.shown import ShownRuns

WAIT_S = 60.0
KEY = "a-key-of-the-tests"


def site_of(folder: Path | None, *named: Path) -> Site:
    """Of a runs folder, or of some runs."""

    def fault(told: str) -> None:
        raise AssertionError(f"a fault of the server: {told}")

    return Site(shown=ShownRuns(folder=folder, named=named), on_fault=fault)


GATE = Gate(key=KEY, host="127.0.0.1", port=8000)


@contextmanager
def client_of(site: Site, gate: Gate = GATE, *, has_key: bool = True) -> Iterator[TestClient]:
    """That has been let in."""
    headers = {"authorization": f"Bearer {KEY}"} if has_key else {}
    with TestClient(
        make_app(site, gate),
        base_url="http://127.0.0.1:8000",
        headers=headers,
        follow_redirects=False,
    ) as client:
        yield client


def with_host(host: str) -> Gate:
    """That was told to listen there."""
    return replace(GATE, host=host)


@dataclass(kw_only=True)
class Serving:
    """One that answers."""

    page_socket: PageSocket
    client: httpx.Client
    """That has the key."""
    loop: asyncio.AbstractEventLoop
    server: PageServer

    def stop(self) -> None:
        """As Ctrl-C does."""
        self.loop.call_soon_threadsafe(self.server.stop)


@contextmanager
def serving(folder: Path) -> Iterator[Serving]:
    """Of a runs folder."""
    page_socket = open_page_socket(host="127.0.0.1", port=0)
    loop = asyncio.new_event_loop()
    made = list[PageServer]()
    is_made = threading.Event()

    async def serve() -> None:
        made.append(PageServer(page_socket, site_of(folder)))
        is_made.set()
        await made[0].serve()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert is_made.wait(WAIT_S)
    headers = {"authorization": f"Bearer {page_socket.gate.key}"}
    with httpx.Client(base_url=page_socket.address, headers=headers, timeout=WAIT_S) as client:
        server = Serving(page_socket=page_socket, client=client, loop=loop, server=made[0])
        try:
            yield server
        finally:
            server.stop()
            thread.join(WAIT_S)
            assert not thread.is_alive(), "the server did not end"
            loop.close()
