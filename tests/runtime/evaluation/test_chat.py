"""A conversation whose user is a person."""

from __future__ import annotations

import asyncio

from milescli.core.types import Prompt
from milescli.runtime.evaluation.chat import Chat
from tests.agents.scripted import Engine, session_of

PROMPT = Prompt(index=4, token_ids=[], text="", label="4")


def _talk(lines: list[str], replies: list[str], *, system: str = "") -> tuple[Chat, list[str]]:
    waiting, shown = iter(lines), list[str]()
    chat = Chat(
        read=lambda: next(waiting, None),
        said=lambda reply, pieces: shown.append(str(reply.message["content"])),
        note=shown.append,
        system=system,
    )
    asyncio.run(chat(PROMPT, session_of(Engine(replies))))
    return chat, shown


def test_a_conversation_goes_on_until_the_person_ends_it() -> None:
    chat, shown = _talk(["one", "  ", "two"], ["first", "second"], system="Be kind.")
    assert shown == ["first", "second"] and chat.has_ended
    assert [(one["role"], one["content"]) for one in chat.messages] == [
        ("system", "Be kind."),
        ("user", "one"),
        ("assistant", "first"),
        ("user", "two"),
        ("assistant", "second"),
    ]


def test_a_new_conversation_forgets_what_was_said() -> None:
    chat, shown = _talk(["one", "/system Be brief.", "two"], ["first", "second"])
    assert shown == ["first"] and not chat.has_ended, "the next one is a session of its own"
    chat.begin()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert _talk(["/new"], [])[0].has_ended is False
