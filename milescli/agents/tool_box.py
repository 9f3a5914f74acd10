"""The tools of one episode: calls are checked, bounded in time and in what they give back, and what
goes wrong is told to the model. The agent that calls them is `tools`."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

from milescli.agents.tool_base import OpenTool
from milescli.agents.tool_kit import Record, ToolKit
from milescli.core.errors import AgentError, MilesError
from milescli.core.user_code import user_traceback
from milescli.rollout.base import ToolCall

MAX_FAILURES = 32
"""Of one tool, before it has ever worked: then it is the tool that is wrong, and the run stops."""
OF_THE_MODEL = (ValueError, ArithmeticError, LookupError)
"""What a tool raises for arguments that make no sense."""


@dataclass(slots=True)
class ToolBox:
    """The tools of one episode; `close` ends what they hold."""

    kit: ToolKit
    num_errors: int = 0
    seconds: float = 0.0
    _opened: dict[str, OpenTool] = field(default_factory=dict)

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
        """The episode has ended."""
        for tool in self._opened.values():
            await tool.close()

    async def _told(self, call: ToolCall) -> str:
        tool, bound_s = self.kit.tools.get(call.name), self.kit.settings.tool_timeout_s
        if tool is None:
            raise ValueError(f"there is no tool {call.name}, only {', '.join(self.kit.tools)}")
        arguments = json.loads(call.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {call.name} are an object, not {call.arguments}")
        tool.check(arguments)
        if call.name not in self._opened:
            self._opened[call.name] = await tool.open()
        try:
            async with asyncio.timeout(bound_s):
                value = await self._opened[call.name].call(arguments)
        except TimeoutError:
            raise _ToolSlow(f"{call.name} did not end within {bound_s:g} s") from None
        self._record(call.name).has_worked = True
        return value if isinstance(value, str) else json.dumps(value, default=str)

    def _told_failure(self, call: ToolCall, error: Exception) -> str:
        """Of the model's mistake what it was; a tool that never works stops the run."""
        if call.name in self.kit.tools and not isinstance(error, OF_THE_MODEL):
            record = self._record(call.name)
            record.num_failures += 1
            if not record.has_worked and record.num_failures >= MAX_FAILURES:
                raise AgentError(
                    f"the tool `{call.name}` failed {record.num_failures} times, and never worked",
                    why=str(error) if isinstance(error, _ToolSlow) else user_traceback(error),
                    fix=f"mend it, or take it out of `rollout.tools`; it was called with "
                    f"{call.arguments:.200}",
                ) from error
        return f"error: {error or type(error).__name__}"

    def _record(self, name: str) -> Record:
        return self.kit.records.setdefault(name, Record())

    def _cut(self, text: str) -> str:
        most = self.kit.settings.tool_output_characters
        if len(text) <= most:
            return text
        return f"{text[:most]}\n... ({len(text) - most:,} more characters)"


class _ToolSlow(Exception):
    """A tool did not end."""
