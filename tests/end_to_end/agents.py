"""Agents of a user's, for the tests of this folder."""

from __future__ import annotations

from milescli.core.types import Prompt
from milescli.rollout.base import Outcome, Session

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


async def dialogue(prompt: Prompt, session: Session) -> Outcome:
    """Three turns with a user who does not listen; the second is tried twice."""
    messages, said = list(prompt.messages), []
    for more in ("Go on.", "And é?", ""):
        reply = await session.chat(messages, tools=[ADD], max_new_tokens=6)
        if more == "And é?":
            await session.chat(messages, tools=[ADD], max_new_tokens=3)
        said.append(reply.message["content"])
        messages += [reply.message, {"role": "user", "content": more}]
    return Outcome(text=" ".join(said), figures={"said": float(len(said))})
