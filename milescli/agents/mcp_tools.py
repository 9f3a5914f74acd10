"""Provides the tools of a run's MCP servers, which are started and listed once in a process, in a
thread and event loop of their own. Called by `tool_kit`; `mcp_server` connects to one server."""

from __future__ import annotations

import asyncio
import atexit
import base64
import binascii
import contextlib
import json
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TypeVar

from milescli.agents.mcp_server import CLOSE_TIMEOUT_S, ServerLink
from milescli.core.concurrency import all_or_first_error
from milescli.core.errors import RecipeError
from milescli.recipe.agents import McpServer
from milescli.recipe.schema import Rollout

T = TypeVar("T")


class McpTool:
    """Implements milescli.agents.tool_kit.Tool and OpenTool: a server does not distinguish
    episodes."""

    def __init__(self, servers: McpServers, link: ServerLink, listed: Any) -> None:
        """Set the tool. `listed`: its entry in the server's list of tools."""
        self.name: str = listed.name
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": listed.name,
                "description": " ".join((listed.description or "").split()),
                "parameters": listed.input_schema,
            },
        }
        self._servers, self._link = servers, link

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Do nothing: the server itself validates the arguments."""

    async def open(self) -> McpTool:
        """Open the tool for one episode."""
        return self

    async def call(self, arguments: Mapping[str, Any]) -> str | list[str | bytes]:
        """Call the tool, and return its text, or texts and image files in their order."""
        future = self._servers.begin(self._link.call(self.name, arguments))
        result = await asyncio.wrap_future(future)
        parts = [
            self._link.redacted(part) if isinstance(part, str) else part
            for part in parts_of(result)
        ]
        texts = [part for part in parts if isinstance(part, str)]
        if result.is_error:
            raise ValueError("\n".join(texts))
        return "\n".join(texts) if len(texts) == len(parts) else parts

    async def close(self) -> None:
        """Do nothing: the server continues to run."""


@dataclass(eq=False)
class McpServers:
    """Holds the MCP servers of one recipe in this process."""

    settings: Mapping[str, McpServer]
    _tools: list[McpTool] | None = None
    _links: dict[str, ServerLink] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _loop: asyncio.AbstractEventLoop | None = None

    def tools(self) -> Sequence[McpTool]:
        """Return all tools that may be called. The first caller starts and queries the servers;
        raises RecipeError or MachineError if one is not usable."""
        with self._lock:
            if self._tools is None:
                self._tools = self.begin(self._list_all()).result()
            return self._tools

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        """Run a coroutine in the event loop of the servers; return a concurrent future."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="miles-mcp", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """End the servers; a later call starts them again."""
        if self._loop is not None and self._loop.is_running():
            self.begin(self._close_all()).result(timeout=2 * CLOSE_TIMEOUT_S)

    async def _list_all(self) -> list[McpTool]:
        for name, settings in self.settings.items():
            self._links[name] = ServerLink(name=name, settings=settings)
        links = self._links.values()
        try:
            listed = await all_or_first_error(link.tools() for link in links)
            return [
                McpTool(self, link, told)
                for link, tools in zip(links, listed, strict=True)
                for told in _allowed(link, tools)
            ]
        except BaseException:
            await self._close_all()
            raise

    async def _close_all(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links.values()))


_SERVERS: dict[str, McpServers] = {}
"""Recipe settings -> servers: training and evaluation share them."""


def servers_of(rollout: Rollout) -> McpServers:
    """Return the servers of `rollout.mcp` in this process; none is started yet. Raises RecipeError
    if the package mcp is not installed."""
    require_package(rollout)
    key = rollout.model_dump_json(include={"mcp"})
    if key not in _SERVERS:
        if not _SERVERS:
            atexit.register(close_servers)
            # it tells of each server that ends, by traceback; so do we, in a line
            logging.getLogger("mcp").addHandler(logging.NullHandler())
        _SERVERS[key] = McpServers(settings=rollout.mcp)
    return _SERVERS[key]


def close_servers() -> None:
    """End all servers that this process has started. Idempotent; a later call starts them again."""
    for servers in _SERVERS.values():
        servers.close()


def require_package(rollout: Rollout) -> None:
    """Raise RecipeError if the recipe has MCP servers, but the package `mcp` is not installed."""
    if rollout.mcp and find_spec("mcp") is None:
        raise RecipeError(
            "the servers of `rollout.mcp` cannot be used",
            why="the package mcp is not installed",
            fix="pip install 'miles-cli[agents]'",
        )


def parts_of(result: Any) -> list[str | bytes]:
    """Return a result's texts and image files; for other content, a text that says what was left
    out."""
    parts = list[str | bytes]()
    for part in result.content:
        resource = getattr(part, "resource", None)
        text = getattr(part, "text", None) or getattr(resource, "text", None)
        kind = getattr(resource or part, "mime_type", None) or part.type
        data = getattr(resource, "blob", None) or getattr(part, "data", None)
        if text is None and data is not None and kind.startswith("image/"):
            with contextlib.suppress(binascii.Error):  # then there is no image either
                data = base64.b64decode(data)
            parts.append(data if isinstance(data, bytes) else b"")
        else:
            parts.append(text if text is not None else f"({kind} left out)")
    if not parts and result.structured_content is not None:
        return [json.dumps(result.structured_content)]
    return parts


def _allowed(link: ServerLink, tools: Sequence[Any]) -> list[Any]:
    """Return the tools that the recipe allows. Raises RecipeError if the server lacks one."""
    wanted = link.settings.tools
    if wanted is None:
        return list(tools)
    known = {tool.name: tool for tool in tools}
    if lacking := next((name for name in wanted if name not in known), None):
        raise RecipeError(
            f"the MCP server `{link.name}` has no tool `{lacking}`",
            why=f"it has {', '.join(known) or 'none'}",
            fix=f"write `tools: [{', '.join(known)}]` for `{link.name}` in `rollout.mcp`",
        )
    return [known[name] for name in wanted]
