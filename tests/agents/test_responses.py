"""OpenAI's responses by its own client: items that come back are the turns that the policy said,
and what is asked is recorded as by the session itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from milescli.agents.proxy import SessionProxy
from milescli.agents.responses_form import MAX_STORED, StoredResponses, UnknownResponse
from milescli.data.tokenizer import ChatTokenizer
from milescli.rollout.base import SessionAddress
from milescli.rollout.episode.session import RecordingSession
from tests.data.chat_templates import QWEN_3, tokenizer_of
from tests.rollout.episode.test_conversations import Engine, session_of

ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}
CALLS = '<think>\nhm\n</think>\n\nso<tool>add({"a": 1})</tool>'
LAST = "<think>\nwell\n</think>\n\ntwo"
Play = Callable[[openai.AsyncOpenAI, RecordingSession], Awaitable[Any]]


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    """Of bytes, with a template that writes the reasoning of turns since the user spoke."""
    return tokenizer_of(QWEN_3.template, special=QWEN_3.special, eos=QWEN_3.eos)


def served(tokenizer: ChatTokenizer, texts: list[str], play: Play) -> Any:
    """What `play` returns, of a session whose engine says `texts`."""

    async def run() -> Any:
        proxy = SessionProxy(tokenizer=tokenizer, model="policy", max_model_len=4000)
        session = session_of(Engine(tokenizer, texts), max_tokens=4000)
        address = proxy.open(session)
        try:
            async with asyncio.timeout(60), client_of(address) as client:
                return await play(client, session)
        finally:
            proxy.close(address)
            await proxy.stop()

    return asyncio.run(run())


def client_of(address: SessionAddress) -> openai.AsyncOpenAI:
    """As an agent makes one."""
    return openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0)


async def ask(client: openai.AsyncOpenAI, given: Any, **options: Any) -> Any:
    """With the tool `add`."""
    options = {"tools": [ADD], "instructions": "Be brief.", **options}
    return await client.responses.create(model="policy", input=given, **options)


def output_of(call: Any) -> dict[str, Any]:
    """What the tool gave."""
    return {"type": "function_call_output", "call_id": call.call_id, "output": "2"}


def is_one_line(session: RecordingSession) -> bool:
    """Whether all that was sampled is in one trajectory, and no history was written otherwise."""
    (line,) = session.trajectories()
    num_sampled = sum(len(turn.response_ids) for turn in session.turns)
    return sum(line.loss_mask) == num_sampled and not session.figures["rewritten_histories"]


@pytest.mark.parametrize("left_out", [(), ("reasoning",)], ids=["whole", "without reasoning"])
def test_a_conversation_by_items_is_one_trajectory(
    tokenizer: ChatTokenizer, left_out: tuple[str, ...]
) -> None:
    async def play(client: openai.AsyncOpenAI, session: RecordingSession) -> None:
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "begin"}]}]
        first = await ask(client, items)
        assert first.status == "completed" and first.output_text == "so"
        reasoning, message, call = first.output
        assert reasoning.content[0].text == "hm" and message.type == "message"
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        told = [item.model_dump(exclude_unset=True) for item in first.output]
        items += [item for item in told if item["type"] not in left_out]
        second = await ask(client, [*items, output_of(call)])
        assert second.output_text == "two"
        (line,) = session.trajectories()
        assert second.usage.total_tokens == line.num_tokens
        assert is_one_line(session)

    served(tokenizer, [CALLS, LAST], play)


def test_a_conversation_by_previous_response_id_is_the_same(tokenizer: ChatTokenizer) -> None:
    async def play(client: openai.AsyncOpenAI, session: RecordingSession) -> None:
        first = await ask(client, "begin")
        output = [{"type": "input_text", "text": "2"}]
        given = [{**output_of(first.output[-1]), "output": output}]
        second = await ask(client, given, previous_response_id=first.id)
        assert second.output_text == "two" and second.previous_response_id == first.id
        assert is_one_line(session)
        other = await ask(client, [output_of(first.output[-1])], previous_response_id=first.id)
        assert other.output_text == "or 3"  # any response can be gone on from again
        assert len(session.trajectories()) == 2

    served(tokenizer, [CALLS, LAST, "or 3"], play)


def test_instructions_are_of_one_request(tokenizer: ChatTokenizer) -> None:
    async def play(client: openai.AsyncOpenAI, session: RecordingSession) -> None:
        first = await ask(client, "begin", instructions="Shout.", tools=[])
        given = [{"role": "developer", "content": "Now whisper."}]
        await ask(client, given, instructions=None, previous_response_id=first.id, tools=[])
        texts = [tokenizer.inner.decode(turn.prompt_ids) for turn in session.turns]
        assert "system\nShout." in texts[0] and "Shout." not in texts[1]
        assert "system\nNow whisper." in texts[1]

    served(tokenizer, ["one", "two"], play)


def test_turns_that_follow_each_other_stay_two(tokenizer: ChatTokenizer) -> None:
    async def play(client: openai.AsyncOpenAI, session: RecordingSession) -> None:
        said = [("assistant", "one"), ("assistant", "two"), ("user", "and?")]
        given: list[Any] = [{"role": role, "content": text} for role, text in said]
        given.insert(1, {"type": "reasoning", "id": "rs_1", "summary": []})
        await ask(client, given)
        text = tokenizer.inner.decode(session.turns[0].prompt_ids)
        assert text.count("<|im_start|>assistant") == 3

    served(tokenizer, ["three"], play)


def test_a_response_that_was_cut_off_is_incomplete(tokenizer: ChatTokenizer) -> None:
    async def play(client: openai.AsyncOpenAI, session: RecordingSession) -> None:
        cut = await ask(client, "begin", max_output_tokens=5)
        assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
        assert cut.output[-1].status == "incomplete" and cut.max_output_tokens == 5
        stream = await ask(client, "begin", stream=True)
        assert [event.type async for event in stream][-1] == "response.incomplete"

    served(tokenizer, ["it is...", "it was..."], play)


def test_a_stream_tells_the_same(tokenizer: ChatTokenizer) -> None:
    async def play(client: openai.AsyncOpenAI, session: RecordingSession) -> None:
        events, options = [], {"tools": [ADD], "instructions": "Be brief."}
        async with client.responses.stream(model="policy", input="begin", **options) as stream:
            async for event in stream:
                events.append(event)
            whole = await stream.get_final_response()
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = {event.type: event.delta for event in events if event.type.endswith(".delta")}
        assert deltas == {
            "response.reasoning_text.delta": "hm",
            "response.output_text.delta": "so",
            "response.function_call_arguments.delta": '{"a": 1}',
        }
        done = [event.item.type for event in events if event.type == "response.output_item.done"]
        assert done == ["reasoning", "message", "function_call"]
        second = await ask(client, [output_of(whole.output[-1])], previous_response_id=whole.id)
        assert second.output_text == "two" and is_one_line(session)

    served(tokenizer, [CALLS, LAST], play)


def test_no_tool_is_called_where_none_shall_be(tokenizer: ChatTokenizer) -> None:
    async def play(client: openai.AsyncOpenAI, session: RecordingSession) -> None:
        await ask(client, "begin", tool_choice="none")
        assert "add" not in tokenizer.inner.decode(session.turns[0].prompt_ids)

    served(tokenizer, ["one"], play)


USER = {"role": "user", "content": "begin"}
CALL = {"type": "function_call", "call_id": "call_0", "name": "add", "arguments": "{}"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "`input` must be text"),
    ({"input": []}, "`input` is empty"),
    ({"input": ["hi"]}, "`input` must be text or a list"),
    ({"input": [{"type": ["message"]}]}, "are not supported"),
    ({"input": [{"type": "web_search_call"}]}, "`web_search_call` are not supported"),
    ({"input": [{"content": "who"}]}, "a message must have content and a role"),
    ({"input": [{"role": "user", "content": 3}]}, "content of a message must be text"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "`input_image`"),
    ({"input": [{"type": "reasoning", "content": 3}]}, "a reasoning must be text"),
    ({"input": [USER, {**CALL, "arguments": {}}]}, "a function_call must have"),
    ({"input": [USER, {"type": "function_call_output", "call_id": []}]}, "call_id `[]`"),
    ({"input": [CALL, {**CALL, "type": "function_call_output"}]}, "the output of a function"),
    ({"input": "a", "instructions": 3}, "`instructions` must be text"),
    ({"input": "a", "max_output_tokens": 0}, "`max_output_tokens` must be a whole number"),
    ({"input": "a", "tool_choice": {"type": "function"}}, "not constrained"),
    (
        {"input": "a", "text": {"format": {"type": "json_object"}}},
        "`text.format` must be text, because sampling",
    ),
    ({"input": "a", "text": {"format": 3}}, "`text.format` must be text, because sampling"),
    ({"input": "a", "tools": {"a": 1}}, "`tools` must be a list"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "`web_search` are not supported"),
    ({"input": "a", "tools": [{"type": "function"}]}, "a tool must have a name"),
    ({"input": "a", "background": True}, "`background` is not supported"),
    ({"input": "a", "previous_response_id": "resp_9"}, "keeps no response `resp_9`"),
    ({"input": "a", "previous_response_id": ["resp_9"]}, "keeps no response"),
]
"""(body, what the error says)."""


def test_what_cannot_be_served_is_said(tokenizer: ChatTokenizer) -> None:
    async def play(client: openai.AsyncOpenAI, session: RecordingSession) -> None:
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(headers=headers) as http:
            for body, told in REFUSED:
                response = await http.post(f"{client.base_url}responses", json=body)
                assert response.status_code == 400, body
                assert told in response.json()["error"]["message"], body
        assert not session.turns

    served(tokenizer, ["one"], play)


def test_a_response_that_is_not_kept_has_the_code_that_clients_know(
    tokenizer: ChatTokenizer,
) -> None:
    async def play(client: openai.AsyncOpenAI, session: RecordingSession) -> None:
        first = await ask(client, "begin", store=False)
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, "and?", previous_response_id=first.id)
        assert caught.value.code == "previous_response_not_found"

    served(tokenizer, ["one"], play)


def test_the_newest_responses_of_a_session_are_kept() -> None:
    kept = StoredResponses()
    for number in range(MAX_STORED + 1):
        kept.add(f"resp_{number}", [{"role": "user", "content": str(number)}])
    with pytest.raises(UnknownResponse, match="`resp_0`"):
        kept.up_to("resp_0")
    assert kept.up_to("resp_1")[0]["content"] == "1"


def test_a_response_of_another_session_is_unknown(tokenizer: ChatTokenizer) -> None:
    async def run() -> None:
        proxy = SessionProxy(tokenizer=tokenizer, model="policy", max_model_len=4000)
        addresses = [proxy.open(session_of(Engine(tokenizer, ["one"]))) for _ in range(2)]
        async with client_of(addresses[0]) as own, client_of(addresses[1]) as other:
            first = await ask(own, "begin")
            with pytest.raises(openai.BadRequestError, match="keeps no response"):
                await ask(other, "and?", previous_response_id=first.id)
        await proxy.stop()

    asyncio.run(run())
