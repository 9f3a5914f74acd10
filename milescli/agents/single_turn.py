"""The built-in agent: one question, one response. `rollout.agent=single_turn`."""

from __future__ import annotations

from milescli.core.types import Prompt
from milescli.rollout.base import Outcome, Session


async def single_turn(prompt: Prompt, session: Session) -> Outcome:
    """The response to the prompt is all there is, and the recipe's reward scores it."""
    turn = await session.generate(prompt.token_ids)
    return Outcome(text=turn.text)
