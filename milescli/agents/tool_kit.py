"""Loads all tools of a run: `rollout.tools`, and those of the servers in `rollout.mcp`. They are
created once in a process. Called by the agent `tools`, and when a run starts."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from milescli.agents.mcp_tools import require_package, servers_of
from milescli.core.concurrency import in_thread
from milescli.core.errors import RecipeError
from milescli.recipe.schema import Rollout
from milescli.rollout.episode.agents import named_tools, plays_here
from milescli.rollout.tool_schema import fits, parameters_of, schema_of


class OpenTool(Protocol):
    """Defines a tool within one episode."""

    async def call(self, arguments: Mapping[str, Any]) -> object:
        """Call the tool; return text, JSON values, or images (`data.images.content_of`). Raise
        ValueError, ArithmeticError or LookupError for mistakes of the model, MilesError to stop the
        run, and anything else for a failure of the tool. The caller bounds the time."""
        ...

    async def close(self) -> None:
        """Release the tool at the end of the episode."""
        ...


class Tool(Protocol):
    """Defines a tool of a run, which any number of episodes use at once."""

    @property
    def name(self) -> str:
        """Return the name by which the model calls the tool."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """Return the description that the model is shown, in OpenAI's form."""
        ...

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError, with a message for the model, if the arguments are invalid."""
        ...

    async def open(self) -> OpenTool:
        """Open the tool for one episode. May wait until other episodes release theirs; that is no
        failed call."""
        ...


class FunctionTool:
    """Implements milescli.agents.tool_kit.Tool."""

    def __init__(self, function: Any, *, name: str, settings: Rollout) -> None:
        """Set the function. Raises RecipeError if it does not declare its parameters."""
        self.name, self.schema = name, schema_of(function, name=name)
        self._function, self._settings = function, settings
        self._parameters = {parameter.name: parameter for parameter in parameters_of(function)}

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError if the arguments are invalid."""
        known = self._parameters
        if unknown := arguments.keys() - known.keys():
            raise ValueError(f"{self.name} takes {', '.join(known)}, not {', '.join(unknown)}")
        lacking = [
            name
            for name, parameter in known.items()
            if parameter.default is inspect.Parameter.empty and name not in arguments
        ]
        if lacking:
            raise ValueError(f"{self.name} needs {', '.join(lacking)}")
        for name, value in arguments.items():
            if not fits(value, known[name]):
                raise ValueError(f"{name} of {self.name} must not be {json.dumps(value)}")

    async def open(self) -> OpenFunction:
        """Open the tool for one episode."""
        if not inspect.isclass(self._function):
            return OpenFunction(self._function)
        made = self._function(self._settings)
        if (begin := getattr(made, "open", None)) is not None:
            await begin()
        return OpenFunction(made)


class OpenFunction:
    """Implements milescli.agents.tool_kit.OpenTool."""

    def __init__(self, function: Any) -> None:
        """Call `function`, or a callable object."""
        self._function = function

    async def call(self, arguments: Mapping[str, Any]) -> object:
        """Call the tool, and return text or JSON values."""
        function = self._function
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object's own `async def`
        ):
            return await function(**arguments)
        return await in_thread(lambda: function(**arguments))

    async def close(self) -> None:
        """Release the tool at the end of the episode."""
        close = getattr(self._function, "close", None)
        ended = close() if close is not None else None
        if inspect.isawaitable(ended):
            await ended


@dataclass(slots=True)
class Record:
    """Counts the calls of one tool over all episodes of this process."""

    has_worked: bool = False
    num_failures: int = 0


class ToolKit:
    """Holds the tools of all episodes."""

    def __init__(self, settings: Rollout) -> None:
        """Load the tools without starting MCP servers. Raises RecipeError if a tool is not
        usable."""
        require_package(settings)
        self.settings = settings
        self.tools: dict[str, Tool] = {
            name: FunctionTool(tool, name=name, settings=settings)
            for name, tool in named_tools(settings).items()
        }
        self.records: dict[str, Record] = {}
        self._is_whole = not settings.mcp

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Return the descriptions that the model is shown, in OpenAI's form."""
        return [tool.schema for tool in self.tools.values()]

    async def complete(self) -> None:
        """Add the tools of the MCP servers; the first caller starts and lists them. Raises
        RecipeError or MachineError if one is not usable."""
        if not self._is_whole:
            self._add(await in_thread(servers_of(self.settings).tools))

    def complete_now(self) -> None:
        """Do the same as `complete`, outside of an event loop."""
        if not self._is_whole:
            self._add(servers_of(self.settings).tools())

    def _add(self, tools: Iterable[Tool]) -> None:
        if self._is_whole:  # by another that waited
            return
        known = dict(self.tools)
        for tool in tools:
            if tool.name in known:
                raise RecipeError(
                    f"two tools have the name `{tool.name}`",
                    why="a server of `rollout.mcp` has one of them, and the model calls a tool "
                    "by its name",
                    fix=f"list the server's other tools in its `tools`, or remove `{tool.name}` "
                    "from `rollout.tools`",
                )
            known[tool.name] = tool
        self.tools, self._is_whole = known, True


def offered_tools(rollout: Rollout) -> list[Mapping[str, Any]]:
    """Return the tools that the model may call, in OpenAI's form; starts and lists the MCP servers.
    An agent in a process of its own starts them there again. Raises as `ToolKit.complete`."""
    kit = ToolKit(rollout)
    kit.complete_now()
    if rollout.mcp and not plays_here(rollout):
        servers_of(rollout).close()
    return kit.schemas
