"""All tools of a run, of whatever kind: `rollout.tools`, and those of the servers in `rollout.mcp`.
Made once in a process. Called by the agent `tools`, and where a run begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from milescli.agents.function_tool import FunctionTool
from milescli.agents.mcp_tools import require_package, servers_of
from milescli.agents.tool_base import Tool
from milescli.core.concurrency import in_thread
from milescli.core.errors import RecipeError
from milescli.recipe.schema import Rollout
from milescli.rollout.episode.agents import named_tools, plays_here


@dataclass(slots=True)
class Record:
    """Of one tool, over all episodes of this process."""

    has_worked: bool = False
    num_failures: int = 0


class ToolKit:
    """The tools of all episodes."""

    def __init__(self, settings: Rollout) -> None:
        """Starts nothing. Raises RecipeError where a tool cannot be had."""
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
        """What the model is told, in OpenAI's form."""
        return [tool.schema for tool in self.tools.values()]

    async def complete(self) -> None:
        """With the tools of servers, which are asked for them by the first that waits. Raises
        RecipeError or MachineError where one cannot be used."""
        if not self._is_whole:
            self._add(await in_thread(servers_of(self.settings).tools))

    def complete_now(self) -> None:
        """As `complete`, where no event loop runs."""
        if not self._is_whole:
            self._add(servers_of(self.settings).tools())

    def _add(self, tools: Iterable[Tool]) -> None:
        if self._is_whole:  # by another that waited
            return
        known = dict(self.tools)
        for tool in tools:
            if tool.name in known:
                raise RecipeError(
                    f"two tools are called `{tool.name}`",
                    why="a server of `rollout.mcp` has one, and the model calls a tool by its name",
                    fix=f"name the server's other tools in its `tools`, or take `{tool.name}` out "
                    "of `rollout.tools`",
                )
            known[tool.name] = tool
        self.tools, self._is_whole = known, True


def offered(rollout: Rollout) -> list[Mapping[str, Any]]:
    """What the model may call, in OpenAI's form; servers are started, and asked. Those of an agent
    that plays in a process of its own are started there again. Raises as `ToolKit.complete`."""
    kit = ToolKit(rollout)
    kit.complete_now()
    if rollout.mcp and not plays_here(rollout):
        servers_of(rollout).close()
    return kit.schemas
