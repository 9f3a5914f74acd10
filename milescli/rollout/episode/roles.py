"""Builds the messages that each role of an episode sees, and turns worked episodes into the
conversations of their roles. Knows no engine; the agent `multi_agent` and the warm-up call it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milescli.core.errors import DataError
from milescli.core.types import Prompt, Trajectory
from milescli.data.chat_masks import mark_chat, tokenize_marked
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.agents import Role
from milescli.recipe.schema import Rollout

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTurn:
    """Holds one turn of a role."""

    role: str
    """Name of the role."""
    message: Message
    """The message as the role itself sees it later; other roles see its content."""


def roles_of(rollout: Rollout) -> Mapping[str, Role]:
    """Return the roles that speak in an episode; empty if the agent has no roles."""
    return rollout.roles if rollout.agent == "multi_agent" else {}


def conversation_of(
    name: str, roles: Mapping[str, Role], *, prompt: Prompt, turns: Sequence[RoleTurn]
) -> list[dict[str, Any]]:
    """Return the messages that the role `name` sees after `turns` of all roles. What others say
    between two of its turns is one message, as many chat templates require."""
    role = roles[name]
    messages = _opening(role, prompt)
    for turn in turns:
        if turn.role == name:
            messages.append(dict(turn.message))
        elif role.sees != "prompt":
            _append_text(messages, f"{turn.role}: {turn.message['content']}")
    return messages


def episode_as_json(turns: Sequence[RoleTurn]) -> str:
    """Return an episode as JSON, for a reward that reads all of it: `[{"role": name, "content":
    text}, ...]`."""
    said = [{"role": turn.role, "content": turn.message["content"]} for turn in turns]
    return json.dumps(said, ensure_ascii=False)


def role_demonstrations(
    prompt: Prompt, tokenizer: ChatTokenizer, *, roles: Mapping[str, Role]
) -> dict[str, Trajectory]:
    """Return role -> its conversation in a worked episode, with its own turns on the loss mask, for
    trained roles that speak there. If the chat template needs several sequences for a conversation,
    the others are named `ROLE (2)` and so on. Raises DataError if a turn names no role, ValueError
    as `mark_chat`."""
    turns = _worked_turns(prompt, roles)
    shown = {}
    for name, role in roles.items():
        places = [place for place, turn in enumerate(turns) if turn.role == name]
        if not role.is_trained or not places:
            continue
        before = conversation_of(name, roles, prompt=prompt, turns=turns[: places[0]])
        whole = conversation_of(name, roles, prompt=prompt, turns=turns[: places[-1] + 1])
        lines = tokenize_marked(tokenizer, mark_chat(tokenizer, whole, first=len(before)))
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


def _append_text(messages: list[dict[str, Any]], text: str) -> None:
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
