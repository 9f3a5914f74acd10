"""Implements `rollout.agent=single_turn`, the default: one prompt, one response."""

from __future__ import annotations

from milescli.core.types import Prompt
from milescli.rollout.base import Outcome, Session


async def single_turn(prompt: Prompt, session: Session) -> Outcome:
    """Answer the prompt with a single response, which the recipe's reward scores."""
    turn = await session.generate(prompt.token_ids)
    return Outcome(text=turn.text)
