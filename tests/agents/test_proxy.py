"""Sessions over HTTP, by the clients that agents use: what is asked through them is recorded as by
the session itself, and nobody gets at another's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from milescli.agents import proxy as proxies
from milescli.agents.proxy import SessionProxy
from milescli.core.errors import WorkerDied
from milescli.data.tokenizer import ChatTokenizer
from milescli.rollout.base import SessionAddress
from milescli.rollout.episode.session import RecordingSession
from tests.data.chat_templates import CHATML, tokenizer_of
from tests.rollout.episode.test_conversations import TOOL, Engine, session_of
from tests.waiting import until_async

USER = {"role": "user", "content": "begin"}


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    """Of bytes."""
    return tokenizer_of(CHATML.template, special=CHATML.special, eos=CHATML.eos)


Play = Callable[[SessionAddress, RecordingSession], Awaitable[Any]]


def served(
    tokenizer: ChatTokenizer,
    texts: list[str],
    play: Play,
    *,
    max_tokens: int = 4000,
    kind: type[Engine] = Engine,
) -> Any:
    """What `play` returns, of a session whose engine says `texts`."""

    async def run() -> Any:
        session = session_of(kind(tokenizer, texts), max_tokens=max_tokens)
        proxy = SessionProxy(tokenizer=tokenizer, model="policy", max_model_len=max_tokens)
        address = proxy.open(session)
        try:
            async with asyncio.timeout(60):
                return await play(address, session)
        finally:
            proxy.close(address)
            await proxy.stop()

    return asyncio.run(run())


def client_of(address: SessionAddress) -> openai.AsyncOpenAI:
    """As an agent makes one."""
    return openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0)


async def ask(address: SessionAddress, messages: list[Any], **options: Any) -> Any:
    """By OpenAI's client."""
    async with client_of(address) as client:
        return await client.chat.completions.create(model="policy", messages=messages, **options)


def test_openais_client_chats_calls_tools_and_is_recorded_as_one_trajectory(
    tokenizer: ChatTokenizer,
) -> None:
    async def play(address: SessionAddress, session: RecordingSession) -> None:
        first = await ask(address, [USER], tools=[TOOL], logprobs=True)
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert {entry.logprob for entry in choice.logprobs.content} == {-2.0}
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        messages = [USER, choice.message.model_dump(exclude_none=True), result]
        second = await ask(address, messages, tools=[TOOL], extra_body={"return_token_ids": True})
        assert second.choices[0].message.content == "two"
        assert second.choices[0].finish_reason == "stop"
        told = second.choices[0].model_extra or {}
        (line,) = session.trajectories()
        assert told["prompt_token_ids"] + told["token_ids"] == line.token_ids.tolist()
        assert second.usage is not None and second.usage.total_tokens == line.num_tokens

    served(tokenizer, ['<tool>add({"a":1})</tool>', "two"], play)


def test_a_stream_tells_the_same(tokenizer: ChatTokenizer) -> None:
    async def play(address: SessionAddress, session: RecordingSession) -> None:
        async with client_of(address) as client:
            stream = await client.chat.completions.create(
                model="policy",
                messages=[USER],
                tools=[TOOL],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "so"
        (calls,) = [delta.tool_calls for delta in deltas if delta.tool_calls]
        assert calls[0].index == 0 and calls[0].function.name == "add"
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage is not None

    served(tokenizer, ['so<tool>add({"a":1})</tool>'], play)


def test_several_choices_are_several_turns(tokenizer: ChatTokenizer) -> None:
    async def play(address: SessionAddress, session: RecordingSession) -> None:
        made = await ask(address, [USER], n=2)
        assert [choice.message.content for choice in made.choices] == ["one", "two"]
        assert len(session.trajectories()) == 2

    served(tokenizer, ["one", "two"], play)


def test_completions_and_token_ids_are_served(tokenizer: ChatTokenizer) -> None:
    async def play(address: SessionAddress, session: RecordingSession) -> None:
        async with client_of(address) as client:
            text = await client.completions.create(model="policy", prompt="begin", logprobs=1)
            listed = await client.models.list()
        assert (text.choices[0].text, text.choices[0].finish_reason) == ("one", "stop")
        async with httpx.AsyncClient(headers=_bearer(address)) as http:
            url = address.base_url.removesuffix("/v1") + "/inference/v1/generate"
            body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 9}}
            (choice,) = (await http.post(url, json=body)).json()["choices"]
            assert choice["token_ids"] == session.turns[1].response_ids
            told = choice["logprobs"]["content"][0]
            assert told["token"] == f"token_id:{choice['token_ids'][0]}"
            assert told["logprob"] == -3.0
        assert (listed.data[0].model_extra or {})["max_model_len"] == 4000

    served(tokenizer, ["one", "two"], play)


def test_anthropics_form_is_the_same_conversation(tokenizer: ChatTokenizer) -> None:
    async def play(address: SessionAddress, session: RecordingSession) -> None:
        url = address.base_url + "/messages"
        tool = {"name": "add", "input_schema": TOOL["function"]["parameters"]}
        body: dict[str, Any] = {"max_tokens": 99, "system": "brief", "tools": [tool]}
        messages: list[Any] = [USER]
        async with httpx.AsyncClient(headers={"x-api-key": address.api_key}) as http:
            first = (await http.post(url, json={**body, "messages": messages})).json()
            assert first["stop_reason"] == "tool_use"
            text, used = first["content"]
            assert text["text"] == "so" and used["input"] == {"a": 1}
            result = {"type": "tool_result", "tool_use_id": used["id"], "content": "2"}
            messages += [{"role": "assistant", "content": first["content"]}]
            messages += [{"role": "user", "content": [result]}]
            streamed = await http.post(url, json={**body, "messages": messages, "stream": True})
            events = [line for line in streamed.text.splitlines() if line.startswith("event: ")]
            assert events[0] == "event: message_start" and events[-1] == "event: message_stop"
            assert '"text": "two"' in streamed.text
        (line,) = session.trajectories()
        assert sum(line.loss_mask) == sum(len(turn.response_ids) for turn in session.turns)

    served(tokenizer, ['so<tool>add({"a":1})</tool>', "two"], play)


def _bearer(address: SessionAddress) -> dict[str, str]:
    return {"Authorization": f"Bearer {address.api_key}"}


CHAT, TEXT, MESSAGES, IDS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages"),
    "/inference/v1/generate",
)


REFUSED: list[tuple[str, Any, str]] = [
    (CHAT, "{", "not valid JSON"),
    (CHAT, "[1]", "not a JSON object"),
    (CHAT, "[" * 100_000, "nested too deeply"),
    (CHAT, {}, "`messages` must be a non-empty list"),
    (CHAT, {"messages": ["hi"]}, "`messages` must be a non-empty list"),
    (CHAT, {"messages": [{"content": "who"}]}, "role"),
    (CHAT, {"messages": [USER], "n": 0}, "`n` must be a whole number"),
    (CHAT, {"messages": [USER], "n": 10_000}, "at most 128"),
    (CHAT, {"messages": [USER], "max_tokens": "many"}, "`max_tokens`"),
    (CHAT, {"messages": [USER], "stop": [""]}, "`stop`"),
    (CHAT, {"messages": [USER], "tool_choice": "required"}, "not constrained"),
    (CHAT, {"messages": [USER], "tools": {"a": 1}}, "`tools` must be a list"),
    (CHAT, {"messages": [USER], "tool_choice": {"type": "function"}}, "not constrained"),
    (CHAT, {"messages": [USER], "response_format": {"type": "json_object"}}, "must be text"),
    (CHAT, {"messages": [USER], "guided_regex": "a+"}, "`guided_regex` is not supported"),
    (CHAT, {"messages": [USER], "logit_bias": {"5": 100}}, "`logit_bias` is not supported"),
    (CHAT, {"messages": [USER], "functions": [{"name": "f"}]}, "`functions` is not supported"),
    (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 2}, "`top_logprobs`"),
    (CHAT, {"messages": [USER], "modalities": ["audio"]}, "`modalities`"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    (TEXT, {"prompt": "a", "best_of": 4}, "`best_of` is not supported"),
    (TEXT, {"prompt": "a", "suffix": "z"}, "`suffix` is not supported"),
    (TEXT, {"prompt": "a", "stream": True}, "`stream` is not supported here"),
    (TEXT, {"prompt": "a", "logprobs": 5}, "`top_logprobs` are not supported"),
    (IDS, {"token_ids": [5], "sampling_params": {"logit_bias": {"5": 1}}}, "`logit_bias`"),
    (
        MESSAGES,
        {"messages": [USER], "max_tokens": 9, "tool_choice": {"type": "any"}},
        "`tool_choice` must be auto or none, because sampling",
    ),
    (TEXT, {"prompt": 3}, "`prompt`"),
    (TEXT, {"prompt": "a", "echo": True}, "`echo`"),
    (MESSAGES, {"messages": [USER]}, "`max_tokens`"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    (TEXT, {"prompt": "a", "stop": 5}, "`stop` must be"),
    (MESSAGES, {"messages": [USER], "max_tokens": 9, "stop_sequences": 3}, "`stop_sequences`"),
    (MESSAGES, {"messages": [USER], "max_tokens": 9, "tools": 5}, "`tools` must be a list"),
    (IDS, {"token_ids": []}, "token ids"),
    (IDS, {"token_ids": [2**40]}, "not token ids"),
]
"""(path, body, what the error says)."""


def test_what_cannot_be_served_is_said(tokenizer: ChatTokenizer) -> None:
    async def play(address: SessionAddress, session: RecordingSession) -> None:
        root = address.base_url.removesuffix("/v1")
        async with httpx.AsyncClient(headers=_bearer(address)) as http:
            for path, body, told in REFUSED:
                content = body if isinstance(body, str) else json.dumps(body)
                response = await http.post(root + path, content=content)
                assert response.status_code == 400, (path, body)
                assert told in response.json()["error"]["message"], (path, body)
        assert not session.trajectories()

    served(tokenizer, ["one"], play)


def test_what_says_nothing_of_its_own_is_served(tokenizer: ChatTokenizer) -> None:
    async def play(address: SessionAddress, session: RecordingSession) -> None:
        body = {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "begin"}]}],
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "logprobs": True,
            **dict.fromkeys(("tool_choice", "logit_bias", "top_logprobs", "functions")),
        }
        async with httpx.AsyncClient(headers=_bearer(address)) as http:
            told = await http.post(f"{address.base_url}/chat/completions", json=body)
            text = {"prompt": "begin", "best_of": 1, "suffix": None, "logit_bias": None}
            also = await http.post(f"{address.base_url}/completions", json=text)
        assert told.status_code == also.status_code == 200

    served(tokenizer, ["one", "two"], play)


def test_a_conversation_without_room_has_the_code_that_clients_know(
    tokenizer: ChatTokenizer,
) -> None:
    async def play(address: SessionAddress, session: RecordingSession) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            long = {"role": "user", "content": "long " * 50}
            await ask(address, [long])
        assert caught.value.code == "context_length_exceeded"

    served(tokenizer, ["one"], play, max_tokens=60)


def test_no_key_opens_another_session_and_none_a_closed_one(tokenizer: ChatTokenizer) -> None:
    async def run() -> None:
        sessions = [session_of(Engine(tokenizer, ["one"])) for _ in range(2)]
        proxy = SessionProxy(tokenizer=tokenizer, model="policy", max_model_len=100)
        addresses = [proxy.open(session) for session in sessions]
        assert addresses[0].api_key not in repr(addresses[0])
        await ask(addresses[1], [USER])
        assert [len(session.turns) for session in sessions] == [0, 1]
        proxy.close(addresses[0])
        for key in (addresses[0].api_key, "-", "guess"):
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as http:
                for path in ("/chat/completions", "/messages", "/completions"):
                    body = {"messages": [USER], "max_tokens": 3, "prompt": "a"}
                    refused = await http.post(addresses[0].base_url + path, json=body)
                    assert refused.status_code == 401
                assert (await http.get(addresses[0].base_url + "/models")).status_code == 401
        assert [len(session.turns) for session in sessions] == [0, 1]
        await proxy.stop()

    asyncio.run(run())


def test_a_request_without_end_is_refused_at_its_bound(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxies, "MAX_BODY_BYTES", 1000)

    async def play(address: SessionAddress, session: RecordingSession) -> None:
        async with httpx.AsyncClient(headers=_bearer(address)) as http:
            sent = await http.post(address.base_url + "/chat/completions", content=b" " * 5000)
        assert sent.status_code == 413

    served(tokenizer, ["one"], play)


def test_a_dead_engine_is_not_the_clients_mistake(tokenizer: ChatTokenizer) -> None:
    class Dead(Engine):
        async def generate(self, request: Any) -> Any:
            raise WorkerDied("engine 0 died", why="SIGKILL", fix="look")

    async def play(address: SessionAddress, session: RecordingSession) -> None:
        with pytest.raises(openai.InternalServerError, match="engine 0 died"):
            await ask(address, [USER])
        assert isinstance(session.engine_failure, WorkerDied)

    served(tokenizer, ["one"], play, kind=Dead)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("ends", ["the client", "the session"])
def test_requests_whose_response_nobody_receives_are_given_up(
    tokenizer: ChatTokenizer, ends: str, streams: bool
) -> None:
    class Slow(Engine):
        async def generate(self, request: Any) -> Any:
            begun.append(request)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                given_up.append(request)
                raise

    begun: list[Any] = []
    given_up: list[Any] = []

    async def run() -> None:
        session = session_of(Slow(tokenizer, []))
        proxy = SessionProxy(tokenizer=tokenizer, model="policy", max_model_len=100)
        address = proxy.open(session)
        asking = asyncio.create_task(ask(address, [USER], stream=streams))
        await until_async(lambda: asking.done() or begun)
        if ends == "the client":
            asking.cancel()
        else:
            proxy.close(address)
            with pytest.raises(openai.InternalServerError, match="has ended"):
                await asking
        await until_async(lambda: bool(given_up) and not proxy.num_open)
        assert not session.turns and not session.trajectories()
        await proxy.stop()

    asyncio.run(run())
    assert len(given_up) == 1


def test_a_session_has_a_bound_on_open_requests(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxies, "MAX_OPEN", 0)

    async def play(address: SessionAddress, session: RecordingSession) -> None:
        with pytest.raises(openai.RateLimitError, match="at most 0 open requests"):
            await ask(address, [USER])

    served(tokenizer, ["one"], play)


def test_it_listens_on_loopback_alone(tokenizer: ChatTokenizer) -> None:
    async def play(address: SessionAddress, session: RecordingSession) -> None:
        assert address.base_url.startswith("http://127.0.0.1:")

    served(tokenizer, ["one"], play)
    assert Path(proxies.__file__).read_text().count("0.0.0.0") == 0
