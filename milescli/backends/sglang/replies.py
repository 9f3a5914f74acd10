"""SGLang's parsers of reasoning and tool calls, as a session asks them. The work is done by
`reply_process`, in a process of its own that is bounded as the user's code is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from milescli.backends.sglang.reply_process import ReplyForm
from milescli.core.async_isolated import AsyncIsolated
from milescli.core.errors import WorkerDied
from milescli.core.user_process import CallFailed
from milescli.rollout.base import Parsed

START_TIMEOUT_S = 150.0
"""Of the first response, which waits for SGLang to be imported."""
PARSE_TIMEOUT_S = 20.0
"""Of each later one, which takes less than a millisecond; many come at once."""
_PROMPT_END = 64
"""Characters of the prompt that tell whether reasoning was opened."""


class SglangReplies:
    """Implements milescli.rollout.base.ReplyParser. Belongs to one event loop."""

    def __init__(self, form: ReplyForm, *, process: AsyncIsolated | None = None) -> None:
        """`process`: of another one, to share; None: one of its own, which begins with the first
        response."""
        self._form = form
        self._num_ended, self._has_replied = 0, False
        """Processes that have ended, or did not reply; whether this one ever has."""
        self.process = process or AsyncIsolated(f"{__package__}.reply_process:parse_there")

    async def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]], *, prompt_end: str = ""
    ) -> Parsed:
        """See ReplyParser. A process that has ended, or does not reply, is replaced, once for a
        response. Raises WorkerDied."""
        asked = (self._form, text, prompt_end[-_PROMPT_END:], list(tools))
        return await self._asked(asked) or await self._asked(asked, is_last=True)

    async def _asked(self, asked: tuple[Any, ...], *, is_last: bool = False) -> Any:
        """What comes of it; None where nothing does, but for the last time."""
        num_ended = self._num_ended
        bound_s = PARSE_TIMEOUT_S if self._has_replied else START_TIMEOUT_S
        try:
            async with asyncio.timeout(bound_s):
                parsed = await self.process.call(*asked, answer=_nothing)
            self._has_replied = True
            return parsed
        except (CallFailed, TimeoutError) as error:
            if num_ended == self._num_ended:  # the first of those that it took along
                self._num_ended, self._has_replied = num_ended + 1, False
                self.process.close()
            if not is_last:
                return None
            raise WorkerDied(
                "the process that reads the model's tool calls failed twice over a response",
                why=str(error) or f"it did not reply within {bound_s:g} s",
                fix="--set rollout.tool_parser=none   # or another, as SGLang names it",
            ) from None

    def close(self) -> None:
        """End its process."""
        self.process.close()


async def _nothing(*asked: object) -> None:
    """The parsers ask for nothing."""
