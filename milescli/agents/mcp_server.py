"""Connects to one MCP server of a run: starts it if necessary, calls it, and restarts it if it ends
too early. Everything here runs in the event loop of `mcp_tools`, which calls it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from milescli.core.concurrency import in_thread
from milescli.core.errors import AgentError, MachineError
from milescli.recipe.agents import McpServer
from milescli.workers.guard import guarded

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool as ToolThere

START_TIMEOUT_S = 60.0
"""Time for a server's handshake; it may have to download itself first (npx, uvx)."""
LIST_TIMEOUT_S = 30.0
"""Time to list all tools of a server."""
CLOSE_TIMEOUT_S = 10.0
"""The `mcp` package itself waits for 2 s, ends the program, and waits for 4 s more."""
MAX_LOST = 8
"""Number of times in a row that a server may be lost before the run stops."""
MAX_PAGES = 100
"""Largest number of pages of a list of tools."""
_TAIL_BYTES = 2048
_LAST_WORDS_S = 1.0
_MIN_SECRET = 6
"""Smallest length of a value that is redacted; shorter ones would match everywhere."""


class ServerLost(Exception):
    """Reports to the model that a server was unreachable, or ended during a call."""


@dataclass(slots=True)
class _Printed:
    """Keeps the end of a program's standard error, and discards the rest."""

    tail: bytes = b""
    _is_over: threading.Event = field(default_factory=threading.Event)

    def open(self) -> IO[str]:
        """Return the end of a pipe that the program writes to; a thread reads the other end."""
        reading, writing = os.pipe()
        self._is_over.clear()
        threading.Thread(target=self._read, args=(reading,), name="miles-mcp", daemon=True).start()
        return os.fdopen(writing, "w")

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while piece := pipe.read(1 << 16):
                self.tail = (self.tail + piece)[-_TAIL_BYTES:]
        self._is_over.set()

    async def last(self) -> str:
        """Return the last error output of a server that has ended, or is about to."""
        await in_thread(lambda: self._is_over.wait(_LAST_WORDS_S))
        return self.tail.decode("utf-8", "replace").strip()


@dataclass(slots=True, kw_only=True)
class ServerLink:
    """Holds the connection to one server. Belongs to one event loop."""

    name: str
    """Name in the recipe."""
    settings: McpServer
    _printed: _Printed = field(default_factory=_Printed)
    _connecting: asyncio.Task[Client] | None = None
    _living: asyncio.Task[None] | None = None
    _end: asyncio.Event = field(default_factory=asyncio.Event)
    _num_lost: int = 0
    """Number of times the server was lost since the last call that returned."""

    async def tools(self) -> list[ToolThere]:
        """Return the server's tools. Raises MachineError if it cannot be started or does not
        answer."""
        self.require_variables()
        try:
            client = await self._connected()
            async with asyncio.timeout(LIST_TIMEOUT_S):
                return await _listed(client)
        except TimeoutError:
            why = f"it did not list its tools within {LIST_TIMEOUT_S:g} s"
        except Exception as error:
            why = self.redacted(str(error) or type(error).__name__)
        raise MachineError(
            f"the MCP server `{self.name}` cannot be used",
            why=why + await self._last_output(),
            fix=self._fix(),
        )

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool and return its CallToolResult. Raises ValueError with the server's error,
        ServerLost if the server ended, AgentError if it was lost MAX_LOST times in a row."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        client: Client | None = None
        try:
            client = await self._connected()
            result = await client.call_tool(tool, dict(arguments))
            self._num_lost = 0
            return result
        except MCPError as error:
            is_over = error.code == CONNECTION_CLOSED or "Session terminated" in error.message
            if client is not None and not is_over:
                self._num_lost = 0
                raise ValueError(self.redacted(error.message)) from None
            why = self.redacted(error.message)
        except Exception as error:
            why = self.redacted(str(error) or type(error).__name__)
        self._lose(client)
        if self._num_lost >= MAX_LOST:
            raise AgentError(
                f"the MCP server `{self.name}` was lost {self._num_lost} times in a row",
                why=why + await self._last_output(),
                fix=self._fix(),
            )
        raise ServerLost(f"the server of {tool} was lost: {why}")

    async def close(self) -> None:
        """Close the connection; a later call starts the server again."""
        self._connecting, living = None, self._living
        self._end.set()
        if living is not None:
            await asyncio.wait([living], timeout=CLOSE_TIMEOUT_S)

    def require_variables(self) -> None:
        """Raise MachineError if an environment variable that the recipe names is not set."""
        wanted = [*self.settings.env, *filter(None, [self.settings.api_key_env])]
        if lacking := next((name for name in wanted if not os.environ.get(name)), None):
            raise MachineError(
                f"the MCP server `{self.name}` needs the environment variable {lacking}",
                why=f"`rollout.mcp` passes it on, but the environment does not define {lacking}",
                fix=f"export {lacking}=...",
            )

    def redacted(self, text: str) -> str:
        """Return the text without the values of the variables that the server received."""
        for name in [*self.settings.env, *filter(None, [self.settings.api_key_env])]:
            value = os.environ.get(name, "")
            if len(value) >= _MIN_SECRET:
                text = text.replace(value, f"<{name}>")
        return text

    async def _connected(self) -> Client:
        """Return the connection, which all callers share; cancelling one does not end it."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> Client:
        """Start the server and wait for its client. Raises ServerLost with the reason."""
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        living = self._living = asyncio.create_task(self._live(ready, self._end))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await asyncio.shield(ready)
        except TimeoutError:
            living.cancel()
            await asyncio.wait([living], timeout=CLOSE_TIMEOUT_S)
            raise ServerLost(f"it did not answer within {START_TIMEOUT_S:g} s") from None

    async def _live(self, ready: asyncio.Future[Client], end: asyncio.Event) -> None:
        """Open and close the connection in one task, as the package requires."""
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._client(stack))
                ready.set_result(client)
                await end.wait()
        except BaseException as error:  # a group of them, of a cancellation too
            if not ready.done():
                ready.set_exception(ServerLost(_first(error)))
                ready.exception()  # whoever waited may have been given up
            if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
                raise

    async def _client(self, stack: AsyncExitStack) -> Client:
        from mcp import Client, StdioServerParameters, stdio_client

        settings = self.settings
        if settings.url is not None:
            return Client(await _http(settings, settings.url, stack), cache=None)
        program, *arguments = guarded(settings.command)
        env = {name: os.environ[name] for name in settings.env if name in os.environ}
        server = StdioServerParameters(command=program, args=arguments, env=env)
        printed = stack.enter_context(self._printed.open())
        return Client(stdio_client(server, errlog=printed), cache=None)

    def _lose(self, client: Client | None) -> None:
        """Drop a lost connection, once, so that the next call connects again."""
        connecting = self._connecting
        if connecting is not None and connecting.done() and _result(connecting) is client:
            self._connecting = None
            self._end.set()
            self._num_lost += 1

    async def _last_output(self) -> str:
        if self.settings.url is not None:
            return ""
        text = self.redacted(await self._printed.last())
        return f"; it printed last:\n{text}" if text else ""

    def _fix(self) -> str:
        if self.settings.url is not None:
            return f"curl -i {self.settings.url}   # is it there, and does it speak MCP?"
        return f"{' '.join(self.settings.command)}   # does it start, and wait for its input?"


async def _http(settings: McpServer, url: str, stack: AsyncExitStack) -> Any:
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    key = os.environ.get(settings.api_key_env or "")
    http = create_mcp_http_client(headers={"Authorization": f"Bearer {key}"} if key else None)
    return streamable_http_client(url, http_client=await stack.enter_async_context(http))


async def _listed(client: Client) -> list[ToolThere]:
    tools, cursor = list[Any](), None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _result(task: asyncio.Task[Client]) -> Client | None:
    if task.cancelled() or task.exception() is not None:
        return None
    return task.result()


def _first(error: BaseException) -> str:
    """Return the message of an error; of a group, that of its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    with contextlib.suppress(Exception):
        if isinstance(error, FileNotFoundError):
            return f"there is no program {error.filename}"
    return str(error) or type(error).__name__
