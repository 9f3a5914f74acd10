"""SGLang's parsers of reasoning and tool calls, as a session asks them. The work is done by
`reply_process`, in a process of its own that is bounded as the user's code is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from milescli.backends.sglang.reply_process import ReplyForm
from milescli.core.async_isolated import AsyncIsolated
from milescli.core.errors import WaitTimeout, WorkerDied
from milescli.core.user_process import CallFailed
from milescli.rollout.base import Parsed

PARSE_TIMEOUT_S = 150.0
"""The first one waits for SGLang to be imported."""
_PROMPT_END = 64
"""Characters of the prompt that tell whether reasoning was opened."""


class SglangReplies:
    """Implements milescli.rollout.base.ReplyParser. Belongs to one event loop."""

    def __init__(self, form: ReplyForm, *, process: AsyncIsolated | None = None) -> None:
        """`process`: of another one, to share; None: one of its own, which begins with the first
        response."""
        self._form = form
        self._num_ended = 0
        """Processes that have ended by themselves."""
        self.process = process or AsyncIsolated(f"{__package__}.reply_process:parse_there")

    async def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]], *, prompt_end: str = ""
    ) -> Parsed:
        """See ReplyParser. A process that has ended is replaced, once for a response. Raises
        WorkerDied, WaitTimeout."""
        asked = (self._form, text, prompt_end[-_PROMPT_END:], list(tools))
        try:
            async with asyncio.timeout(PARSE_TIMEOUT_S):
                return await self._asked(asked) or await self._asked(asked, is_last=True)
        except TimeoutError:
            self.process.close()
            raise WaitTimeout(
                "a response waited in vain for its tool calls to be read",
                why=f"SGLang's parser did not end within {PARSE_TIMEOUT_S:g} s",
                fix="--set rollout.tool_parser=none   # or another, as SGLang names it",
            ) from None

    async def _asked(self, asked: tuple[Any, ...], *, is_last: bool = False) -> Any:
        """What comes of it; None where the process has ended over it, but for the last time."""
        num_ended = self._num_ended
        try:
            return await self.process.call(*asked, answer=_nothing)
        except CallFailed as error:
            if num_ended == self._num_ended:  # the first of those that it took along
                self._num_ended += 1
                self.process.close()
            if not is_last:
                return None
            raise WorkerDied(
                "the process that reads the model's tool calls has ended twice over a response",
                why=str(error),
                fix="--set rollout.tool_parser=none   # or another, as SGLang names it",
            ) from None

    def close(self) -> None:
        """End its process."""
        self.process.close()


async def _nothing(*asked: object) -> None:
    """The parsers ask for nothing."""
