"""What a tool is, for those that call it on behalf of a model. Protocols only: `function_tool` has
the one kind, Python functions and classes, `mcp_tools` the other, tools of MCP servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class OpenTool(Protocol):
    """A tool in one episode."""

    async def call(self, arguments: Mapping[str, Any]) -> object:
        """What it gives: text, or what JSON knows. Raises ValueError, ArithmeticError or
        LookupError for the model's mistakes, MilesError to stop the run, and anything else for
        its own; bounded in time by the caller."""
        ...

    async def close(self) -> None:
        """The episode has ended."""
        ...


class Tool(Protocol):
    """A tool of a run; any number of episodes use it at once."""

    @property
    def name(self) -> str:
        """As the model calls it."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """What the model is told of it, in OpenAI's form."""
        ...

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises ValueError, told for the model, where they are none of its."""
        ...

    async def open(self) -> OpenTool:
        """For one episode; may wait for others, which is no fault of a call."""
        ...
