"""An agent that calls tools until it has its response: `rollout.agent=tools`. The model says what
is called, by its chat template; the results come back to it as messages."""

from __future__ import annotations

from typing import Any

from milescli.agents.replying import next_reply
from milescli.agents.tool_box import ToolBox
from milescli.agents.tool_kit import ToolKit
from milescli.core.types import Prompt, StopReason
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Reply, Session


class ToolAgent:
    """Turns of the model and of the run's tools, bounded by `rollout.max_turns`."""

    def __init__(self, settings: Rollout) -> None:
        """Raises RecipeError where a tool cannot be had."""
        self._kit = ToolKit(settings)
        self._max_turns = settings.max_turns

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """The last turn, which calls nothing, is what the reward scores."""
        await self._kit.complete()
        box = ToolBox(self._kit)
        try:
            return await self._played(prompt, session, box)
        finally:
            await box.close()

    async def _played(self, prompt: Prompt, session: Session, box: ToolBox) -> Outcome:
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
        """One message for each call; of calls that could not be read one that says so."""
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
