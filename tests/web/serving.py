"""A page's server of a real socket in a thread of the tests, ended as Ctrl-C ends it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from milescli.web.serve import Door, PageServer, open_door
from tests.web.written import site_of

WAIT_S = 60.0


@dataclass(kw_only=True)
class Serving:
    """One that answers."""

    door: Door
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
    door = open_door(host="127.0.0.1", port=0)
    loop = asyncio.new_event_loop()
    made = list[PageServer]()
    is_made = threading.Event()

    async def serve() -> None:
        made.append(PageServer(door, site_of(folder)))
        is_made.set()
        await made[0].serve()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert is_made.wait(WAIT_S)
    headers = {"authorization": f"Bearer {door.gate.key}"}
    with httpx.Client(base_url=door.address, headers=headers, timeout=WAIT_S) as client:
        server = Serving(door=door, client=client, loop=loop, server=made[0])
        try:
            yield server
        finally:
            server.stop()
            thread.join(WAIT_S)
            assert not thread.is_alive(), "the server did not end"
            loop.close()
