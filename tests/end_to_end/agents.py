"""Agents of a user's, for the tests of this folder."""

from __future__ import annotations

import httpx

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
    """Three turns with a user who does not listen; the second is tried twice, by HTTP."""
    messages, said = list(prompt.messages), []
    for more in ("Go on.", "And é?", ""):
        reply = await session.chat(messages, tools=[ADD], max_new_tokens=6)
        if more == "And é?":
            headers = {"Authorization": f"Bearer {session.api_key}"}
            body = {"messages": messages, "tools": [ADD], "max_tokens": 3}
            async with httpx.AsyncClient(headers=headers, timeout=60) as http:
                asked = await http.post(f"{session.base_url}/chat/completions", json=body)
            assert asked.status_code == 200, asked.text
        said.append(reply.message["content"])
        messages += [reply.message, {"role": "user", "content": more}]
    return Outcome(text=" ".join(said), figures={"said": float(len(said))})
