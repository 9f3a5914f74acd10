"""Implements `rollout.agent=tools`: an agent that calls tools until it has its response. The model
writes calls in the format of its chat template, and receives the results as messages."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from milescli.agents.replying import next_reply
from milescli.agents.tool_kit import OpenTool, Record, ToolKit
from milescli.core.concurrency import in_thread
from milescli.core.errors import AgentError, MilesError
from milescli.core.files import parse_json
from milescli.core.types import Prompt, StopReason
from milescli.core.user_code import user_traceback
from milescli.data.images import Content, content_of
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Reply, Session, ToolCall

MAX_FAILURES = 32
"""Number of failures of one tool before its first success after which the run stops, because the
tool itself must be faulty."""
MODEL_ERRORS = (ValueError, ArithmeticError, LookupError)
"""Exceptions of a tool that blame the model's arguments."""


@dataclass(slots=True)
class ToolBox:
    """Holds the tools of one episode; `close` releases them."""

    kit: ToolKit
    num_errors: int = 0
    seconds: float = 0.0
    _opened: dict[str, OpenTool] = field(default_factory=dict)

    async def call(self, call: ToolCall) -> Content:
        """Make a call, and return the content of the message that the model gets. Raises AgentError
        if the tool fails each time."""
        began = time.monotonic()
        try:
            content = await self._result_content(call)
        except MilesError:
            raise
        except Exception as error:
            self.num_errors += 1
            content = self._failure_message(call, error)
        finally:
            self.seconds += time.monotonic() - began
        return self._cut(content)

    async def close(self) -> None:
        """Release all tools at the end of the episode. Raises what the `close` of one raises, after
        the others were released."""
        async with AsyncExitStack() as stack:
            for tool in self._opened.values():
                stack.push_async_callback(tool.close)

    async def _result_content(self, call: ToolCall) -> Content:
        tool, bound_s = self.kit.tools.get(call.name), self.kit.settings.tool_timeout_s
        if tool is None:
            raise ValueError(
                f"there is no tool {call.name}; the tools are {', '.join(self.kit.tools)}"
            )
        arguments = parse_json(call.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError(
                f"the arguments of {call.name} must be an object, not {call.arguments}"
            )
        tool.check(arguments)
        if call.name not in self._opened:
            self._opened[call.name] = await tool.open()
        try:
            async with asyncio.timeout(bound_s):
                value = await self._opened[call.name].call(arguments)
        except TimeoutError:
            raise _ToolSlow(f"{call.name} did not end within {bound_s:g} s") from None
        try:
            content = await in_thread(lambda: content_of(value))
        except ValueError as error:
            raise _ImageUnusable(f"{call.name} returned an image: {error}") from error
        self._record(call.name).has_worked = True
        return json.dumps(value, default=str) if content is None else content

    def _failure_message(self, call: ToolCall, error: Exception) -> str:
        """Return the message for the model's mistake. Raises AgentError if a tool never works."""
        if call.name in self.kit.tools and not isinstance(error, MODEL_ERRORS):
            record = self._record(call.name)
            record.num_failures += 1
            if not record.has_worked and record.num_failures >= MAX_FAILURES:
                raise AgentError(
                    f"the tool `{call.name}` failed {record.num_failures} times and never "
                    "succeeded",
                    why=str(error)
                    if isinstance(error, _ToolSlow | _ImageUnusable)
                    else user_traceback(error),
                    fix="fix it, or remove it from `rollout.tools`; it was called with "
                    f"{call.arguments:.200}",
                ) from error
        return f"error: {error or type(error).__name__}"

    def _record(self, name: str) -> Record:
        return self.kit.records.setdefault(name, Record())

    def _cut(self, content: Content) -> Content:
        """Return the content with all its images, and each text within the bound."""
        most = self.kit.settings.tool_output_characters
        if isinstance(content, list):
            return [
                {**part, "text": self._cut(part["text"])} if "text" in part else part
                for part in content
            ]
        if len(content) <= most:
            return content
        return f"{content[:most]}\n... ({len(content) - most:,} more characters)"


class _ToolSlow(Exception):
    """Reports that a tool did not end in time."""


class _ImageUnusable(Exception):
    """Reports that a tool returned an image that no model can be shown."""


class ToolAgent:
    """Alternates turns of the model and of the run's tools, at most `rollout.max_turns`."""

    def __init__(self, settings: Rollout) -> None:
        """Set up the tools. Raises RecipeError if one is not usable."""
        self._kit = ToolKit(settings)
        self._max_turns = settings.max_turns

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Play turns until one calls no tool; the reward scores that turn."""
        await self._kit.complete()
        box = ToolBox(self._kit)
        try:
            return await self._play(prompt, session, box)
        finally:
            await box.close()

    async def _play(self, prompt: Prompt, session: Session, box: ToolBox) -> Outcome:
        messages, text, is_cut = list[Any](prompt.messages), "", True
        for _ in range(self._max_turns):
            reply = await next_reply(session, messages, tools=self._kit.schemas)
            if reply is None:
                break
            text = reply.message["content"]
            if reply.turn.stop_reason is StopReason.LENGTH:
                break
            if not reply.calls and reply.malformed is None:
                is_cut = False
                break
            messages += [reply.message, *await self._results(reply, box)]
        figures = {"tool_errors": float(box.num_errors), "tool_s": box.seconds}
        return Outcome(text=text, is_cut=is_cut, figures=figures)

    async def _results(self, reply: Reply, box: ToolBox) -> list[dict[str, Any]]:
        """Return one message for each call; if the calls cannot be parsed, one message that says
        why."""
        if reply.malformed is not None and not reply.calls:
            return [{"role": "tool", "content": f"error: {reply.malformed}"}]
        return [
            {
                "role": "tool",
                "tool_call_id": told["id"],
                "name": call.name,
                "content": await box.call(call),
            }
            for call, told in zip(reply.calls, reply.message["tool_calls"], strict=True)
        ]
