"""Requests the policy's next reply, if there is room for one, for all agents of several turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from milescli.core.errors import ContextFull
from milescli.rollout.base import Reply, Session


async def next_reply(
    session: Session,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> Reply | None:
    """Return the policy's next reply, or None if the conversation is full, which ends the episode.
    `more`: further arguments of the session's `chat`. Raises ContextFull if even the first reply
    has no room, and as `Session.chat`."""
    try:
        return await session.chat(messages, tools=tools, **more)
    except ContextFull:
        if not session.turns:
            raise
        return None
