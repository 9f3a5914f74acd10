"""What each role of an episode is shown, as messages, and worked episodes as the conversations that
its roles had. Knows no engine; the agent `multi_agent` and the warm-up call it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milescli.core.errors import DataError
from milescli.core.types import Prompt, Trajectory
from milescli.data.chat_masks import marked_chat, tokenized
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.agents import Role
from milescli.recipe.schema import Rollout

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTurn:
    """What a role said."""

    role: str
    """Its name."""
    message: Message
    """As it itself is shown it later; the others are shown its content."""


def roles_of(rollout: Rollout) -> Mapping[str, Role]:
    """Return the roles that speak; none if the agent has no roles."""
    return rollout.roles if rollout.agent == "multi_agent" else {}


def conversation_of(
    name: str, roles: Mapping[str, Role], *, prompt: Prompt, turns: Sequence[RoleTurn]
) -> list[dict[str, Any]]:
    """The messages that the role `name` is shown after `turns` of all roles. What stands between
    two of its own turns is one message, as many chat templates want it."""
    role = roles[name]
    messages = _opening(role, prompt)
    for turn in turns:
        if turn.role == name:
            messages.append(dict(turn.message))
        elif role.sees != "prompt":
            _tell(messages, f"{turn.role}: {turn.message['content']}")
    return messages


def told_whole(turns: Sequence[RoleTurn]) -> str:
    """Return an episode as JSON, for a reward that reads all of it: `[{"role": name, "content":
    text}, ...]`."""
    said = [{"role": turn.role, "content": turn.message["content"]} for turn in turns]
    return json.dumps(said, ensure_ascii=False)


def role_demonstrations(
    prompt: Prompt, tokenizer: ChatTokenizer, *, roles: Mapping[str, Role]
) -> dict[str, Trajectory]:
    """Role -> its conversation in a worked episode, its own turns on the loss mask; of roles that
    are trained and speak there. Where the chat template takes several sequences for a conversation,
    the others are `ROLE (2)` and so on. Raises DataError where a turn says no role's name,
    ValueError as `marked_chat`."""
    turns = _worked_turns(prompt, roles)
    shown = {}
    for name, role in roles.items():
        places = [place for place, turn in enumerate(turns) if turn.role == name]
        if not role.is_trained or not places:
            continue
        before = conversation_of(name, roles, prompt=prompt, turns=turns[: places[0]])
        whole = conversation_of(name, roles, prompt=prompt, turns=turns[: places[-1] + 1])
        lines = tokenized(tokenizer, marked_chat(tokenizer, whole, first=len(before)))
        shown |= {f"{name} ({at})" if at > 1 else name: line for at, line in enumerate(lines, 1)}
    return shown


def _opening(role: Role, prompt: Prompt) -> list[dict[str, Any]]:
    asked = [dict(message) for message in prompt.messages] if role.sees != "others" else []
    if role.prompt is None:
        return asked
    system = role.prompt
    if asked and asked[0]["role"] == "system":
        system = f"{system}\n\n{asked.pop(0)['content']}"
    return [{"role": "system", "content": system}, *asked]


def _tell(messages: list[dict[str, Any]], text: str) -> None:
    if messages and messages[-1]["role"] == "user":
        text = f"{messages.pop()['content']}\n\n{text}"
    messages.append({"role": "user", "content": text})


def _worked_turns(prompt: Prompt, roles: Mapping[str, Role]) -> list[RoleTurn]:
    worked = prompt.demonstration
    assert worked is not None, f"prompt {prompt.index} has no demonstration"
    named = [] if isinstance(worked, str) else [turn.get("name") for turn in worked]
    if not named or any(name not in roles for name in named):
        unknown = [str(name) for name in named if name not in roles]
        raise DataError(
            f"the demonstration of row {prompt.index + 1} does not name the role that speaks",
            why=f"`rollout.roles` are {', '.join(roles)}, and it "
            + (f"has a turn of {unknown[0]}" if unknown else "is a single text"),
            fix="write a demonstration as [{'role': 'assistant', 'name': "
            f"'{next(iter(roles))}', 'content': '...'}}, ...]",
        )
    return [
        RoleTurn(role=turn["name"], message={"role": "assistant", "content": turn["content"]})
        for turn in worked
        if not isinstance(turn, str)
    ]
