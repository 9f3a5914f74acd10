"""Responses that are streamed while they are sampled, in each form: the pieces are the message that
the same request has as a whole, and a stream that cannot go on says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from milescli.agents import proxy as proxies
from milescli.agents.proxy import SessionProxy
from milescli.core.errors import WorkerDied
from milescli.data.tokenizer import ChatTokenizer
from milescli.rollout.base import SessionAddress
from tests.data.chat_templates import QWEN_3, tokenizer_of
from tests.rollout.episode.test_conversations import Engine, session_of
from tests.waiting import until_async

SAID = (
    "<think>\nfirst I add, then I look at the sum</think>\n\nThe sum of one and two is 3 €, "
    'as a < b shows.<tool>add({"a": 1})</tool>'
)
PLAIN = "<think>\nhm</think>\n\nIt is 3: twö, ☃, and a last word"
ASKED: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "begin"}]}
FUNCTION = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
Play = Callable[[SessionAddress, Any], Awaitable[Any]]


class Telling(Engine):
    """Tells of each token before it gives all of them; waits for `go_on` after `wait_after`."""

    def __init__(self, tokenizer: ChatTokenizer, texts: list[str], wait_after: int = 10**9) -> None:
        super().__init__(tokenizer, texts)
        self.wait_after, self.go_on = wait_after, asyncio.Event()
        self.error: Exception | None = None
        self.was_given_up = False

    async def generate(self, request: Any) -> Any:
        """As Engine, piece by piece."""
        done = await super().generate(request)
        try:
            for count in range(1, len(done.response_ids)):
                if request.on_tokens is not None:
                    request.on_tokens(done.response_ids[:count])
                await asyncio.sleep(0)
                if count > self.wait_after:
                    await self.go_on.wait()
                    if self.error is not None:
                        raise self.error
        except asyncio.CancelledError:
            self.was_given_up = True
            raise
        return done


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    """Of bytes."""
    return tokenizer_of(QWEN_3.template, special=QWEN_3.special, eos=QWEN_3.eos)


def served(engine: Telling, play: Play, *, parses: bool = True) -> Any:
    """What `play` returns, where each request has a session of its own."""

    def own_session(asked: Any) -> Any:
        return session_of(engine, parses=parses, cuts_stop=True)

    async def run() -> Any:
        proxy = SessionProxy(
            tokenizer=engine.tokenizer, model="policy", max_model_len=4000, session_of=own_session
        )
        address = proxy.open(own_session(None))
        try:
            async with asyncio.timeout(120):
                return await play(address, proxy)
        finally:
            proxy.close(address)
            await proxy.stop()

    return asyncio.run(run())


async def _events(
    address: SessionAddress, path: str, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """What a stream says, as it comes."""
    headers = {"Authorization": f"Bearer {address.api_key}"}
    async with (
        httpx.AsyncClient(timeout=60, headers=headers) as http,
        http.stream("POST", f"{address.base_url}{path}", json=body | {"stream": True}) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


def _joined(deltas: list[dict[str, Any]], key: str) -> tuple[str, int]:
    """The text of a part, and in how many pieces it came."""
    pieces = [delta[key] for delta in deltas if delta.get(key)]
    return "".join(pieces), len(pieces)


@pytest.mark.parametrize("text", [SAID, PLAIN])
def test_a_chat_comes_in_pieces_that_are_the_whole_message(
    tokenizer: ChatTokenizer, text: str
) -> None:
    tools = [{"type": "function", "function": FUNCTION}] if text is SAID else []

    async def play(address: SessionAddress, proxy: SessionProxy) -> None:
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
            asked: dict[str, Any] = {**ASKED, "tools": tools or openai.omit, "logprobs": True}
            whole = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(**asked, stream=True)
            choices = [part.choices[0] async for part in stream]
        message = whole.choices[0].message.model_dump()
        deltas = [choice.delta.model_dump() for choice in choices]
        for key, least in (("reasoning_content", 1), ("content", 4)):
            said, count = _joined(deltas, key)
            assert said == message[key] and count >= least, (said, count)
        assert [delta["role"] for delta in deltas if delta["role"]] == ["assistant"]
        calls = [call["function"] for delta in deltas for call in delta["tool_calls"] or ()]
        assert calls == [call["function"] for call in message["tool_calls"] or ()]
        assert choices[-1].finish_reason == whole.choices[0].finish_reason
        told = [
            one.token for choice in choices if choice.logprobs for one in choice.logprobs.content
        ]
        assert told == [one.token for one in whole.choices[0].logprobs.content]

    served(Telling(tokenizer, [text, text]), play)


@pytest.mark.parametrize("parses", [False, True])
def test_texts_end_before_the_stop_string_and_tokens_do_not(
    tokenizer: ChatTokenizer, parses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxies, "MAX_OPEN", 0)  # for sessions of several requests
    text, said = "a plus\nde and b\ndef", "a plus\nde and b"
    stop = ["zzz", "\ndef"]

    async def play(address: SessionAddress, proxy: SessionProxy) -> None:
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
            whole = await client.chat.completions.create(
                **ASKED, stop=stop, extra_body={"return_token_ids": True}
            )
            plain = await client.completions.create(model="policy", prompt="begin", stop=stop)
        body = {**ASKED, "max_tokens": 500, "stop_sequences": stop}
        events = [event async for event in _events(address, "/messages", body)]
        ids = (whole.choices[0].model_extra or {})["token_ids"]
        assert tokenizer.decode(ids) == text
        assert (whole.choices[0].message.content, plain.choices[0].text) == (said, said)
        assert whole.choices[0].finish_reason == "stop"
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert _joined(deltas, "text")[0] == said and len(deltas) > 2

    served(Telling(tokenizer, [text] * 3), play, parses=parses)


def test_without_a_parser_all_is_content_and_no_character_is_split(
    tokenizer: ChatTokenizer,
) -> None:
    async def play(address: SessionAddress, proxy: SessionProxy) -> list[Any]:
        return [event async for event in _events(address, "/chat/completions", ASKED)]

    events = served(Telling(tokenizer, [PLAIN]), play, parses=False)
    said, count = _joined([event["choices"][0]["delta"] for event in events], "content")
    assert said == PLAIN and count == len(PLAIN)


def test_anthropics_blocks_grow(tokenizer: ChatTokenizer) -> None:
    tool = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
    asked = {**ASKED, "max_tokens": 500, "tools": [tool]}

    async def play(address: SessionAddress, proxy: SessionProxy) -> list[Any]:
        return [event async for event in _events(address, "/messages", asked)]

    events = served(Telling(tokenizer, [SAID]), play)
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == ["thinking", "text", "tool_use"]
    assert not begun[0]["thinking"] and not begun[1]["text"] and not begun[2]["input"]
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    told = [event["delta"] for event in deltas]
    assert _joined(told, "thinking")[0] == "first I add, then I look at the sum"
    text, count = _joined(told, "text")
    assert text == "The sum of one and two is 3 €, as a < b shows." and count > 3
    assert _joined(told, "partial_json") == ('{"a": 1}', 1)
    assert [event["index"] for event in deltas] == sorted(event["index"] for event in deltas)
    ends = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert ends == [0, 1, 2]
    (last,) = [event for event in events if event["type"] == "message_delta"]
    assert last["delta"]["stop_reason"] == "tool_use" and last["usage"]["input_tokens"] > 0


def test_items_of_a_response_grow(tokenizer: ChatTokenizer) -> None:
    async def play(address: SessionAddress, proxy: SessionProxy) -> Any:
        events = []
        async with (
            openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client,
            client.responses.stream(
                model="policy", input="begin", tools=[{"type": "function", **FUNCTION}]
            ) as stream,
        ):
            async for event in stream:
                events.append(event)
            return events, await stream.get_final_response()

    events, whole = served(Telling(tokenizer, [SAID]), play)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for kind, item in (("reasoning_text", 0), ("output_text", 1)):
        deltas = [event for event in events if event.type == f"response.{kind}.delta"]
        (done,) = [event.text for event in events if event.type == f"response.{kind}.done"]
        assert "".join(event.delta for event in deltas) == done
        assert done == whole.output[item].content[0].text and len(deltas) > 2
        assert {event.output_index for event in deltas} == {item}
    done = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert done == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
def test_a_failure_in_the_middle_ends_the_stream_with_its_reason(
    tokenizer: ChatTokenizer, path: str
) -> None:
    engine = Telling(tokenizer, [PLAIN], wait_after=20)
    engine.error = WorkerDied("engine 0 died", why="SIGKILL", fix="look")

    async def play(address: SessionAddress, proxy: SessionProxy) -> list[Any]:
        events = []
        async for event in _events(address, path, {**ASKED, "max_tokens": 500, "input": "begin"}):
            events.append(event)
            engine.go_on.set()
        return events

    events = served(engine, play, parses=False)
    assert len(events) > 3 and "engine 0 died" in json.dumps(events[-1])


def test_a_failure_before_the_first_piece_has_its_status(tokenizer: ChatTokenizer) -> None:
    engine = Telling(tokenizer, [PLAIN], wait_after=0)
    engine.error = WorkerDied("engine 0 died", why="SIGKILL", fix="look")
    engine.go_on.set()

    async def play(address: SessionAddress, proxy: SessionProxy) -> None:
        async with openai.AsyncOpenAI(
            base_url=address.base_url, api_key=address.api_key, max_retries=0
        ) as client:
            with pytest.raises(openai.InternalServerError, match="engine 0 died"):
                await client.chat.completions.create(**ASKED, stream=True)

    served(engine, play)


@pytest.mark.parametrize("ends", ["the client", "the session"])
def test_a_stream_that_nobody_reads_is_given_up(tokenizer: ChatTokenizer, ends: str) -> None:
    engine = Telling(tokenizer, [PLAIN], wait_after=20)

    async def play(address: SessionAddress, proxy: SessionProxy) -> list[Any]:
        events = []
        async for event in _events(address, "/chat/completions", ASKED):
            events.append(event)
            if ends == "the client":
                break
            proxy.close(address)
        await until_async(lambda: engine.was_given_up)
        await until_async(lambda: not proxy.num_open)
        return events

    events = served(engine, play, parses=False)
    assert ends == "the client" or "the session has ended" in json.dumps(events[-1])
