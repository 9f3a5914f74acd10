"""Chats by turns: what the engine was given and gave is the trajectory, and what it was given is
what the chat template writes, for every family's way of writing chats."""

from __future__ import annotations

import asyncio
import json
import random
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import AgentError, ContextFull
from milescli.core.types import Prompt, StopReason, Trajectory, VersionSpan, WeightVersion
from milescli.data.tokenizer import ChatTokenizer
from milescli.rollout.base import Completion, GenerateRequest, Parsed, Reply, ToolCall
from milescli.rollout.episode.session import ChatForm, RecordingSession
from tests.data.chat_templates import FAMILIES, tokenizer_of

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}
_CALL = re.compile(r"<tool>(\w+)\((.*?)\)</tool>")


class Parser:
    """Reads calls as the families of the tests write them, and reasoning, also where it is open."""

    async def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]], *, prompt_end: str = ""
    ) -> Parsed:
        """See ReplyParser."""
        reasoning = None
        if "<think>" in text or "</think>" in text:
            thought, _, text = text.partition("</think>")
            reasoning = thought.replace("<think>", "").strip()
        calls = [ToolCall(name=name, arguments=given) for name, given in _CALL.findall(text)]
        return Parsed(content=_CALL.sub("", text).strip(), reasoning=reasoning, calls=calls)


class Engine:
    """Says what it is told to, and remembers."""

    def __init__(self, tokenizer: ChatTokenizer, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.given: list[list[int]] = []
        self.gave: list[list[int]] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        """The next text, ended as the family ends it, unless it is said to be cut off."""
        text = self.texts[len(self.given)]
        is_cut = text.endswith("...")
        ids = self.tokenizer.inner(text, add_special_tokens=False)["input_ids"]
        tokens = ids if is_cut else [*ids, self.tokenizer.eos_id]
        self.given.append(list(request.prompt_ids))
        self.gave.append(tokens)
        return Completion(
            response_ids=tokens,
            logprobs=array("f", [-1.0 - len(self.given)] * len(tokens)),
            stop_reason=StopReason.LENGTH if is_cut else StopReason.STOP,
            version_spans=[VersionSpan(start=0, end=len(tokens), version=WeightVersion(0))],
        )


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, ChatTokenizer]:
    """By family."""
    return {
        name: tokenizer_of(family.template, special=family.special, eos=family.eos)
        for name, family in FAMILIES.items()
    }


def session_of(
    engine: Engine, *, max_tokens: int = 100_000, parses: bool = True, cuts_stop: bool = False
) -> RecordingSession:
    """One sample's."""
    parser = Parser() if parses else None
    return RecordingSession(
        engine,  # type: ignore[arg-type]
        prompt=Prompt(index=3, token_ids=[], text=""),
        seed=1,
        settings=GenerateRequest(prompt_ids=(), max_new_tokens=1000),
        max_tokens=max_tokens,
        decode=engine.tokenizer.decode,
        chat_form=ChatForm(tokenizer=engine.tokenizer, parser=parser),
        cuts_stop=cuts_stop,
    )


def user(text: str) -> dict[str, Any]:
    """A turn."""
    return {"role": "user", "content": text}


def chat(
    tokenizer: ChatTokenizer, texts: Sequence[str], *, answers: Sequence[dict[str, Any]]
) -> tuple[Engine, RecordingSession, list[Reply]]:
    """A dialogue: the model says `texts`, and is told `answers` in between."""
    engine = Engine(tokenizer, texts)
    session, replies = session_of(engine), list[Reply]()

    async def play() -> None:
        messages: list[Any] = [user("begin")]
        for number in range(len(texts)):
            replies.append(await session.chat(messages, tools=[TOOL]))
            messages += [replies[-1].message, *answers[number : number + 1]]

    asyncio.run(play())
    return engine, session, replies


def is_recorded(trajectories: Sequence[Trajectory], engine: Engine) -> bool:
    """Whether each response is on the loss mask of one trajectory, behind all that the engine was
    given for it."""
    sampled = list[list[int]]()
    for line in trajectories:
        ids, mask = line.token_ids.tolist(), line.loss_mask
        place = 0
        while place < len(ids):
            if not mask[place]:
                place += 1
                continue
            made = next(
                number
                for number, given in enumerate(engine.given)
                if given == ids[:place] and engine.gave[number] not in sampled
            )
            end = place + len(engine.gave[made])
            assert ids[place:end] == engine.gave[made] and all(mask[place:end])
            assert set(line.logprobs[place:end]) == {-2.0 - made}
            sampled.append(engine.gave[made])
            place = end
    return sorted(sampled) == sorted(engine.gave)


def squeezed(text: str) -> str:
    """Without white space."""
    return "".join(text.split())


DIALOGUES = st.tuples(st.sampled_from(sorted(FAMILIES)), st.integers(0, 2**32))


@given(DIALOGUES)
@settings(max_examples=120, deadline=None)
def test_what_is_trained_on_is_what_the_engine_was_given_and_gave(
    tokenizers: dict[str, ChatTokenizer], drawn: tuple[str, int]
) -> None:
    name, seed = drawn
    family, rng = FAMILIES[name], random.Random(seed)
    texts, answers = [], []
    for number in range(rng.randint(1, 6)):
        text = rng.choice(["", "so", "é ", " well\n", "1 2"]) + str(number)
        if family.has_reasoning and rng.random() < 0.4:
            text = "<think>" + rng.choice(["a", "", " b\n"]) + f"</think>{text}"
        answer = user(f"more {number}")
        if family.has_tools and rng.random() < 0.5:
            spaces = rng.choice(["", " ", "\n"])
            text += f'<tool>add({{"a":{spaces}{rng.randint(0, 99)}}})</tool>'
            answer = {"role": "tool", "content": f"result {number}"}
        texts.append(text + ("..." if rng.random() < 0.2 else ""))
        answers.append(answer)
    engine, session, replies = chat(tokenizers[name], texts, answers=answers)

    assert is_recorded(session.trajectories(), engine)
    messages: list[Any] = [user("begin")]
    for reply, asked, answer in zip(replies, engine.given, answers, strict=True):
        # what the engine was given is what the template writes, but for the model's own spaces
        shown = tokenizers[name].inner.decode(asked, skip_special_tokens=False)
        assert squeezed(shown) == squeezed(tokenizers[name].render(_plain(messages), tools=[TOOL]))
        messages += [reply.message, answer]


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Arguments as mappings, as templates take them."""
    plain = json.loads(json.dumps(list(messages)))
    for message in plain:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return plain


@pytest.mark.parametrize("name", ["chatml", "llama 3", "kimi", "gemma"])
def test_a_dialogue_is_one_trajectory_where_the_template_keeps_what_was_said(
    tokenizers: dict[str, ChatTokenizer], name: str
) -> None:
    answers = [user("more"), user("and more")]
    engine, session, _ = chat(tokenizers[name], ["one", "two", "three"], answers=answers)
    (line,) = session.trajectories()
    assert line.token_ids.tolist() == engine.given[2] + engine.gave[2]
    assert session.figures["rewritten_histories"] == 0


def test_a_call_with_other_spaces_stays_the_tokens_that_the_model_made(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    texts = ['<tool>add({"a":1})</tool>', "two"]
    tool = {"role": "tool", "content": "2"}
    engine, session, (first, _) = chat(tokenizers["chatml"], texts, answers=[tool])
    assert first.calls == [ToolCall(name="add", arguments='{"a":1}')]
    (line,) = session.trajectories()
    begun = engine.given[0] + engine.gave[0]
    assert line.token_ids.tolist()[: len(begun)] == begun
    assert session.figures == {
        "turns": 2,
        "tool_calls": 1,
        "malformed_calls": 0,
        "rewritten_histories": 0,
    }


def test_calls_with_other_spaces_are_gone_on_from_turn_after_turn(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    texts = [f'<tool>add({{"a":{number}}})</tool>' for number in range(4)]
    answers = [{"role": "tool", "content": str(number)} for number in range(3)]
    engine, session, _ = chat(tokenizers["kimi"], texts, answers=answers)
    (line,) = session.trajectories()
    assert line.token_ids.tolist() == engine.given[3] + engine.gave[3]
    assert session.figures["rewritten_histories"] == 0


def test_halves_of_characters_in_calls_and_results_are_replaced_in_what_the_model_reads(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    said = ['<tool>add({"text": "\\ud83d"})</tool>', "done"]
    told = [{"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "caf\udce9"}]
    engine, session, replies = chat(tokenizers["chatml"], said, answers=told)
    assert "caf\ufffd" in engine.tokenizer.inner.decode(engine.given[1])
    assert replies[1].message["content"] == "done"
    assert is_recorded(session.trajectories(), engine)


def test_a_template_that_leaves_reasoning_out_begins_a_new_trajectory_and_it_is_counted(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    texts = ["<think>\nhm\n</think>\n\none", "two"]
    engine, session, (first, _) = chat(tokenizers["qwen 3"], texts, answers=[user("more")])
    assert first.message["reasoning_content"] == "hm"
    lines = session.trajectories()
    assert [sum(line.loss_mask) for line in lines] == [len(gave) for gave in engine.gave]
    assert session.figures["rewritten_histories"] == 1


def test_reasoning_stays_where_the_client_sends_back_less_than_it_was_told(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    engine = Engine(tokenizers["qwen 3"], ["<think>\nhm\n</think>\n\none", "two"])
    session, tool = session_of(engine), {"role": "tool", "content": "2"}

    async def play() -> None:
        reply = await session.chat([user("begin")])
        without = {"role": "assistant", "content": reply.message["content"]}
        await session.chat([user("begin"), without, tool])

    asyncio.run(play())
    assert len(session.trajectories()) == 1


def test_a_turn_can_be_tried_again_and_gone_on_from(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    engine = Engine(tokenizers["chatml"], ["one", "other", "two", "three"])
    session = session_of(engine)

    async def play() -> None:
        first = await session.chat([user("begin")])
        second = await session.chat([user("begin")])
        for reply in (first, second):
            await session.chat([user("begin"), reply.message, user("more")])

    asyncio.run(play())
    lines = [line.token_ids.tolist() for line in session.trajectories()]
    assert lines == [engine.given[2] + engine.gave[2], engine.given[3] + engine.gave[3]]
    assert is_recorded(session.trajectories(), engine)


def test_a_conversation_longer_than_the_context_is_refused_by_its_own_error(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    session = session_of(Engine(tokenizers["chatml"], ["one"]), max_tokens=50)
    with pytest.raises(ContextFull, match="no space"):
        asyncio.run(_asked(session, [user("begin" * 20)]))


@pytest.mark.parametrize("messages", [[{"content": "who?"}], ["text"], [user("a"), user("b")]])
def test_messages_that_the_template_refuses_are_the_agents_mistake(
    tokenizers: dict[str, ChatTokenizer], messages: list[Any]
) -> None:
    session = session_of(Engine(tokenizers["gemma"], ["one"]))
    with pytest.raises(AgentError, match="cannot be rendered"):
        asyncio.run(_asked(session, messages))


async def _asked(session: RecordingSession, messages: list[Any]) -> Reply:
    return await session.chat(messages)
