"""The tools of one episode: calls are checked, bounded in time and in what they give back, and what
goes wrong is told to the model. The agent that calls them is `tools`."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from milescli.core.concurrency import in_thread
from milescli.core.errors import AgentError, MilesError
from milescli.core.user_code import user_traceback
from milescli.recipe.schema import Rollout
from milescli.rollout.agents import named_tools, tool_schemas
from milescli.rollout.base import ToolCall
from milescli.rollout.tool_schema import fits, parameters_of

MAX_FAILURES = 32
"""Of one tool, before it has ever worked: then it is the tool that is wrong, and the run stops."""
OF_THE_MODEL = (ValueError, ArithmeticError, LookupError)
"""What a tool raises for arguments that make no sense."""


@dataclass(slots=True)
class _Record:
    """Of one tool, over all episodes of this process."""

    has_worked: bool = False
    num_failures: int = 0


class ToolKit:
    """The tools of all episodes. Made once in a process."""

    def __init__(self, settings: Rollout) -> None:
        """Raises RecipeError where a tool cannot be had."""
        self.settings = settings
        self.tools = named_tools(settings)
        self.schemas = tool_schemas(settings)
        self.records = {name: _Record() for name in self.tools}
        self.parameters = {name: parameters_of(tool) for name, tool in self.tools.items()}


@dataclass(slots=True)
class ToolBox:
    """The tools of one episode; `close` ends what they hold."""

    kit: ToolKit
    num_errors: int = 0
    seconds: float = 0.0
    _opened: dict[str, Any] = field(default_factory=dict)

    async def call(self, call: ToolCall) -> str:
        """What the model is told of it. Raises AgentError where the tool fails each time."""
        began = time.monotonic()
        try:
            told = await self._told(call)
        except MilesError:
            raise
        except Exception as error:
            self.num_errors += 1
            told = self._told_failure(call, error)
        finally:
            self.seconds += time.monotonic() - began
        return self._cut(told)

    async def close(self) -> None:
        """Of tools that were made for this episode."""
        for tool in self._opened.values():
            close = getattr(tool, "close", None)
            ended = close() if close is not None else None
            if inspect.isawaitable(ended):
                await ended

    async def _told(self, call: ToolCall) -> str:
        if call.name not in self.kit.tools:
            raise ValueError(f"there is no tool {call.name}, only {', '.join(self.kit.tools)}")
        arguments = self._arguments(call)
        function, bound_s = await self._function(call.name), self.kit.settings.tool_timeout_s
        try:
            async with asyncio.timeout(bound_s):
                if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
                    getattr(function, "__call__", None)  # noqa: B004 - an object's own `async def`
                ):
                    value = await function(**arguments)
                else:
                    value = await in_thread(lambda: function(**arguments))
        except TimeoutError:
            raise _ToolSlow(f"{call.name} did not end within {bound_s:g} s") from None
        self.kit.records[call.name].has_worked = True
        return value if isinstance(value, str) else json.dumps(value, default=str)

    async def _function(self, name: str) -> Any:
        tool = self.kit.tools[name]
        if not inspect.isclass(tool):
            return tool
        if name not in self._opened:
            made = tool(self.kit.settings)
            if (begin := getattr(made, "open", None)) is not None:
                await begin()  # it may wait for others, which is no fault of the call
            self._opened[name] = made
        return self._opened[name]

    def _arguments(self, call: ToolCall) -> Mapping[str, Any]:
        """Raises ValueError where they are none of the tool's."""
        arguments = json.loads(call.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {call.name} are an object, not {call.arguments}")
        known = {parameter.name: parameter for parameter in self.kit.parameters[call.name]}
        if unknown := arguments.keys() - known.keys():
            raise ValueError(f"{call.name} takes {', '.join(known)}, not {', '.join(unknown)}")
        lacking = [
            name
            for name, parameter in known.items()
            if parameter.default is inspect.Parameter.empty and name not in arguments
        ]
        if lacking:
            raise ValueError(f"{call.name} needs {', '.join(lacking)}")
        for name, value in arguments.items():
            if not fits(value, known[name]):
                raise ValueError(f"{name} of {call.name} must not be {json.dumps(value)}")
        return arguments

    def _told_failure(self, call: ToolCall, error: Exception) -> str:
        """Of the model's mistake what it was; a tool that never works stops the run."""
        record = self.kit.records.get(call.name)
        if record is not None and not isinstance(error, OF_THE_MODEL):
            record.num_failures += 1
            if not record.has_worked and record.num_failures >= MAX_FAILURES:
                raise AgentError(
                    f"the tool `{call.name}` failed {record.num_failures} times, and never worked",
                    why=str(error) if isinstance(error, _ToolSlow) else user_traceback(error),
                    fix=f"mend it, or take it out of `rollout.tools`; it was called with "
                    f"{call.arguments:.200}",
                ) from error
        return f"error: {error or type(error).__name__}"

    def _cut(self, text: str) -> str:
        most = self.kit.settings.tool_output_characters
        if len(text) <= most:
            return text
        return f"{text[:most]}\n... ({len(text) - most:,} more characters)"


class _ToolSlow(Exception):
    """A tool did not end."""
