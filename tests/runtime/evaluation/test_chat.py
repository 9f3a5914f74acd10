"""A conversation whose user is a person."""

from __future__ import annotations

import asyncio
import io

from milescli.console.output import Mode, Output
from milescli.core.types import Prompt
from milescli.runtime.evaluation.chat import Chat
from tests.agents.scripted import Engine, session_of
from tests.agents.test_streams import Telling
from tests.data.chat_templates import QWEN_3, tokenizer_of
from tests.rollout.episode.test_conversations import session_of as recording

PROMPT = Prompt(index=4, token_ids=[], text="", label="4")


def _talk(
    lines: list[str],
    replies: list[str],
    *,
    system: str = "",
    most: int = 1,
    max_tokens: int = 100_000,
) -> tuple[Chat, list[str]]:
    """At most so many conversations."""
    waiting, shown, engine = iter(lines), list[str](), Engine(replies)
    chat = Chat(
        read=lambda: next(waiting, None),
        show_reply=lambda reply, pieces: shown.append(str(reply.message["content"])),
        note=shown.append,
        refuse=shown.append,
        system=system,
    )

    async def play(number: int) -> None:
        shown.append(f"conversation {number}")
        await chat(PROMPT, session_of(engine, max_tokens=max_tokens))
        shown.extend(["the end"] if chat.has_ended else [])
        chat.has_ended = chat.has_ended or number + 1 == most

    asyncio.run(chat.hold(play))
    return chat, shown


def test_a_conversation_goes_on_until_the_person_ends_it() -> None:
    chat, shown = _talk(["one", "  ", "two"], ["first", "second"], system="Be kind.")
    assert shown == ["conversation 0", "first", "second", "the end"]
    assert [(one["role"], one["content"]) for one in chat.messages] == [
        ("system", "Be kind."),
        ("user", "one"),
        ("assistant", "first"),
        ("user", "two"),
        ("assistant", "second"),
    ]


def test_a_new_conversation_forgets_what_was_said() -> None:
    chat, shown = _talk(["one", "/system Be brief.", "two"], ["first", "second"])
    assert shown == ["conversation 0", "first"], "the next one is a session of its own"
    chat.begin()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]


def test_a_message_without_room_begins_the_next_conversation() -> None:
    lines = ["one", "y" * 60, "two"]
    chat, shown = _talk(lines, ["first", "second", "third"], most=9, max_tokens=100)
    assert [one for one in shown if "limit" not in one] == [
        *("conversation 0", "first", "conversation 1", "second"),
        *("conversation 2", "third", "the end"),
    ]
    assert [one["content"] for one in chat.messages if one["role"] == "user"] == ["two"]


def test_a_message_that_is_too_long_by_itself_is_left_out() -> None:
    _, shown = _talk(["x" * 200, "two"], ["first"], most=9, max_tokens=100)
    assert shown[0] == "conversation 0" and shown[2:] == ["conversation 1", "first", "the end"]
    assert "left out: its messages have" in shown[1] and "at most 100" in shown[1]


def test_a_conversation_in_which_nothing_is_said_is_not_held() -> None:
    for lines in ([], ["/new", " ", "/system Be brief."]):
        chat, shown = _talk(lines, [])
        assert shown == [] and chat.has_ended
    assert chat.system == "Be brief."


def test_a_person_sees_a_reply_while_it_is_sampled() -> None:
    tokenizer = tokenizer_of(QWEN_3.template, special=QWEN_3.special, eos=QWEN_3.eos)
    out = io.StringIO()
    output = Output(Mode.HUMAN, stdout=out)
    seen = list[str]()

    def piece(text: str) -> None:
        output.piece(text)
        seen.append(out.getvalue())

    chat = Chat(
        read=iter(["go on", None]).__next__,
        show_reply=lambda reply, pieces: output.text(str(reply.message["content"])),
        note=output.note,
        refuse=output.warn,
        piece=piece,
        first="one",
    )
    asyncio.run(chat(PROMPT, recording(Telling(tokenizer, ["It is 3.", "Yes: 3."]), parses=False)))
    assert out.getvalue() == "It is 3.\nYes: 3.\n" and seen[0] == "I" and len(seen) > 10
