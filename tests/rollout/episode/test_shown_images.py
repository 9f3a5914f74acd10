"""Images that messages of a chat hold, as tools and environments return them: they become tokens of
the next turn, stay in every later one, and travel with the sample."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image as Pillow

from milescli.agents.proxy import SessionProxy
from milescli.core.errors import AgentError, ContextFull
from milescli.core.types import (
    Group,
    ImageSpan,
    Prompt,
    Sample,
    StopReason,
    VersionSpan,
    WeightVersion,
)
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tokenizer import ChatTokenizer, load_tokenizer
from milescli.models.scratch import write_config
from milescli.recipe.model import ScratchModel
from milescli.rollout.base import Completion, GenerateRequest
from milescli.rollout.collect.group_record import decode_group, encode_group
from milescli.rollout.episode.session import ChatForm, RecordingSession
from milescli.train.packing import images_of

IMAGE_ID = 5
CALL = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    """Of a model that sees images, and of one that does not."""
    made = {}
    for name in ("qwen2_5_vl", "qwen3"):
        folder = tmp_path_factory.mktemp(name)
        sees = name == "qwen2_5_vl"
        make_scratch_tokenizer(["What is it? A red one."], 300, folder, sees_images=sees)
        write_config(ScratchModel(family=name), folder)  # type: ignore[arg-type]
        made[name] = load_tokenizer(folder)
    return made


@pytest.fixture
def sees(tokenizers: dict[str, ChatTokenizer]) -> ChatTokenizer:
    """The tokenizer of the model that sees images."""
    return tokenizers["qwen2_5_vl"]


class Engine:
    """Says its texts in turn, and remembers what it was asked."""

    def __init__(self, tokenizer: ChatTokenizer, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        """See RolloutEngine."""
        ids = self.tokenizer.inner(self.texts[len(self.requests)])["input_ids"]
        self.requests.append(request)
        tokens = [*ids, self.tokenizer.eos_id]
        return Completion(
            response_ids=tokens,
            logprobs=array("f", [-1.0] * len(tokens)),
            stop_reason=StopReason.STOP,
            version_spans=[VersionSpan(start=0, end=len(tokens), version=WeightVersion(0))],
        )


def png(side: int, colour: str) -> bytes:
    """A file: of 56 pixels four tokens, of 28 one."""
    buffer = io.BytesIO()
    Pillow.new("RGB", (side, side), colour).save(buffer, format="PNG")
    return buffer.getvalue()


def part(data: bytes) -> dict[str, Any]:
    """A part of a message, in OpenAI's form."""
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def told(*parts: dict[str, Any] | str) -> dict[str, Any]:
    """The result of a tool."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": "tool", "name": "look", "tool_call_id": "call_0", "content": content}


def prompt_of(tokenizer: ChatTokenizer, images: Sequence[bytes] = ()) -> Prompt:
    assert tokenizer.images is not None
    read = [tokenizer.images.processor.read(image) for image in images]
    spans, start = [], 1
    for image in read:
        at = {"start": start, "num_tokens": image.num_tokens, "grid": image.grid}
        spans.append(ImageSpan(**at, sha256=image.sha256))
        start += image.num_tokens
    return Prompt(
        index=3,
        token_ids=[7, *[IMAGE_ID] * (start - 1)],
        text="<image>" * len(read) + "What is it?",
        images=read,
        image_spans=spans,
    )


def session_of(engine: Engine, prompt: Prompt, *, max_tokens: int = 1000) -> RecordingSession:
    return RecordingSession(
        engine,  # type: ignore[arg-type]
        prompt=prompt,
        seed=1,
        settings=GenerateRequest(prompt_ids=(), max_new_tokens=100),
        max_tokens=max_tokens,
        decode=engine.tokenizer.decode,
        chat_form=ChatForm(tokenizer=engine.tokenizer),
    )


def chat(session: RecordingSession, *results: dict[str, Any]) -> None:
    """Let the policy speak, and after each result again."""

    async def play() -> None:
        messages = list[Any](session._prompt.messages)
        for result in (*results, None):
            reply = await session.chat(messages)
            messages += [reply.message, result]

    asyncio.run(play())


def shown(request: GenerateRequest, tokenizer: ChatTokenizer) -> str:
    """What an engine was asked, with an `I` for each token of an image."""
    text = tokenizer.inner.decode(list(request.prompt_ids), skip_special_tokens=False)
    return str(text).replace("<|image_pad|>", "I")


def test_an_image_of_a_tool_is_shown_from_the_next_turn_on(sees: ChatTokenizer) -> None:
    engine = Engine(sees, ["a", "b", "c"])
    session = session_of(engine, prompt_of(sees))
    chat(session, told("left", part(png(56, "red")), "right"), told("no more"))
    assert [len(request.images) for request in engine.requests] == [0, 1, 1]
    expected = "tool\nleft<|vision_start|>IIII<|vision_end|>right<|im_end|>"
    assert all(expected in shown(request, sees) for request in engine.requests[1:])
    (line,) = session.trajectories()
    (span,) = line.image_spans
    places = range(span.start, span.start + span.num_tokens)
    assert [place for place, token in enumerate(line.token_ids) if token == IMAGE_ID] == [*places]
    assert not any(line.loss_mask[place] for place in places)
    assert sum(line.loss_mask) == 6, "three turns of two tokens"
    assert [image.sha256 for image in line.images] == [span.sha256]
    assert engine.requests[1].images[0][1] == line.images[0].png
    assert session.figures["rewritten_histories"] == 0


def test_images_of_the_prompt_and_of_tools_stand_in_their_order(sees: ChatTokenizer) -> None:
    engine = Engine(sees, ["a", "b", "c"])
    session = session_of(engine, prompt_of(sees, [png(28, "blue")]))
    chat(session, told(part(png(56, "red"))), told(part(png(28, "blue")), part(png(28, "green"))))
    counts = [[span.num_tokens for span, _ in request.images] for request in engine.requests]
    assert counts == [[1], [1, 4], [1, 4, 1, 1]]
    (line,) = session.trajectories()
    assert len(line.image_spans) == 4
    assert len(line.images) == 2, "that of the prompt is the prompt's, whoever shows it"
    own = [image.sha256 for image in session._prompt.images]
    assert [own[0], *(image.sha256 for image in line.images)] == [
        *dict.fromkeys(span.sha256 for span in line.image_spans)
    ]


def test_samples_that_show_the_same_image_share_its_bytes(sees: ChatTokenizer) -> None:
    lines = []
    for _ in range(2):
        session = session_of(Engine(sees, ["a", "b"]), prompt_of(sees))
        chat(session, told(part(png(56, "red"))))
        lines += session.trajectories()
    assert lines[0].images[0] is lines[1].images[0]


def test_another_model_cuts_the_same_image_in_its_own_way(
    sees: ChatTokenizer, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sees.folder, tmp_path / "model"))
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "patch_size": 28}))
    lines = []
    for tokenizer in (sees, load_tokenizer(folder)):
        session = session_of(Engine(tokenizer, ["a", "b"]), prompt_of(tokenizer))
        chat(session, told(part(png(56, "red"))))
        lines += session.trajectories()
    assert [line.token_ids.tolist().count(IMAGE_ID) for line in lines] == [4, 1]
    assert lines[0].images[0].sha256 == lines[1].images[0].sha256


def test_a_mark_that_a_tool_or_the_policy_writes_is_text(sees: ChatTokenizer) -> None:
    engine = Engine(sees, ["<image>", "b", "c"])
    chat(session_of(engine, prompt_of(sees, [png(28, "red")])), told("an <image> tag"), told("ok"))
    assert [len(request.images) for request in engine.requests] == [1, 1, 1]
    assert "an <image> tag" in shown(engine.requests[1], sees)


def test_a_group_with_images_of_tools_is_the_same_after_it_was_on_disk(
    sees: ChatTokenizer,
) -> None:
    prompt, samples = prompt_of(sees, [png(28, "red")]), []
    for number in range(3):
        session = session_of(Engine(sees, ["a", "b"]), prompt)
        chat(session, told(part(png(56, "red"))))
        samples.append(
            Sample(
                sample_index=number,
                seed=1,
                trajectories=session.trajectories(),
                text="b",
                stop_reason=StopReason.STOP,
                reward=0.0,
            )
        )
    group = Group(prompt=prompt, samples=samples)
    head, parts = encode_group(9, group)
    returned = samples[0].trajectories[0].images[0]
    assert parts.count(returned.png) == 1, "each image is stored once"
    again = decode_group(head, b"".join(parts), prompt=prompt)
    assert again == group
    assert images_of([again]) == {image.sha256: image.png for image in (returned, *prompt.images)}
    head["images"][0]["sha256"] = "0" * 64
    with pytest.raises(KeyError):
        decode_group(head, b"".join(parts), prompt=prompt)


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (part(b"1234"), "are not one of PNG"),
        (part(png(28, "red")[:60]), "cannot be read"),
        ({"type": "image", "image": "/etc/hostname"}, "not a data URL"),
        ({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}, "not a data URL"),
    ],
)
def test_an_image_that_cannot_be_shown_is_named_with_its_message(
    sees: ChatTokenizer, image: dict[str, Any], why: str
) -> None:
    engine = Engine(sees, ["a", "b"])
    with pytest.raises(AgentError) as raised:
        chat(session_of(engine, prompt_of(sees)), told(image))
    assert why in raised.value.why and len(engine.requests) == 1
    assert "`tool look`" in raised.value.why


def test_a_part_without_an_image_is_refused(sees: ChatTokenizer) -> None:
    engine = Engine(sees, ["a", "b"])
    with pytest.raises(AgentError) as raised:
        chat(session_of(engine, prompt_of(sees)), told(part(png(28, "red")), {"type": "image"}))
    assert "holds none" in raised.value.why and len(engine.requests) == 1


def test_a_model_without_images_reads_that_one_was_left_out(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    engine = Engine(tokenizers["qwen3"], ["a", "b"])
    session = session_of(engine, Prompt(index=3, token_ids=[7], text="What is it?"))
    chat(session, told("see ", part(b"1234")))
    text = shown(engine.requests[1], engine.tokenizer)
    assert "see (image left out: the model does not accept images)<|im_end|>" in text
    assert not session.trajectories()[0].images


def test_an_image_longer_than_the_context_ends_the_conversation(sees: ChatTokenizer) -> None:
    engine = Engine(sees, ["a", "b"])
    session = session_of(engine, prompt_of(sees), max_tokens=30)
    with pytest.raises(ContextFull):
        chat(session, told(part(png(560, "red"))))
    (line,) = session.trajectories()
    assert not line.images and not line.image_spans


def test_a_text_that_spells_the_token_of_an_image_is_not_sent(sees: ChatTokenizer) -> None:
    """An engine would wait for its image, also where nothing else shows one."""
    engine = Engine(sees, ["a", "b"])
    with pytest.raises(AgentError, match="cannot be rendered"):
        chat(session_of(engine, prompt_of(sees)), told("<|image_pad|>"))
    assert len(engine.requests) == 1


def test_a_sampled_image_token_is_not_sent_again(sees: ChatTokenizer) -> None:
    """An engine would wait for its image."""
    engine = Engine(sees, ["<|image_pad|>", "b"])
    session = session_of(engine, prompt_of(sees))
    chat(session, told("ok"))
    assert IMAGE_ID not in engine.requests[1].prompt_ids
    assert session.figures["rewritten_histories"] == 1
    ids = [*engine.requests[0].prompt_ids, IMAGE_ID]
    with pytest.raises(ContextFull, match="ended"):
        asyncio.run(session.generate(ids))


def test_a_template_that_drops_images_of_tools_is_named(sees: ChatTokenizer) -> None:
    dropping = ChatTokenizer(
        sees.inner,
        folder=sees.folder,
        template=str(sees.template).replace(
            "message['content'] is string", "message['content'] is string or message.role == 'tool'"
        ),
    )
    assert dropping.template != sees.template
    with pytest.raises(AgentError) as raised:
        chat(session_of(Engine(dropping, ["a", "b"]), prompt_of(sees)), told(part(png(28, "red"))))
    assert "0 image tokens for 1 images" in raised.value.why


def test_images_of_one_branch_are_not_those_of_another(sees: ChatTokenizer) -> None:
    engine = Engine(sees, ["a", "b", "c"])
    session = session_of(engine, prompt_of(sees))

    async def play() -> None:
        first = await session.chat(session._prompt.messages)
        for colour in ("red", "green"):
            result = told(part(png(28, colour)))
            await session.chat([*session._prompt.messages, first.message, result])

    asyncio.run(play())
    red, green = session.trajectories()
    assert red.images != green.images and len(red.images) == len(green.images) == 1
    # the branches differ in their image alone
    assert replace(red, images=()).token_ids[:-2] == replace(green, images=()).token_ids[:-2]


def test_a_client_over_http_may_send_images(sees: ChatTokenizer) -> None:
    engine = Engine(sees, ["a"])
    session = session_of(engine, prompt_of(sees))
    path = {"type": "image_url", "image_url": {"url": "/etc/hostname"}}

    async def play() -> None:
        proxy = SessionProxy(tokenizer=sees, model="policy", max_model_len=1000)
        address = proxy.open(session)
        try:
            headers = {"Authorization": f"Bearer {address.api_key}"}
            async with asyncio.timeout(60), httpx.AsyncClient(headers=headers) as http:
                for shown, status in ((path, 400), (part(png(56, "red")), 200)):
                    body = {"messages": [{"role": "user", "content": [shown]}]}
                    response = await http.post(f"{address.base_url}/chat/completions", json=body)
                    assert response.status_code == status, response.text
        finally:
            proxy.close(address)
            await proxy.stop()

    asyncio.run(play())
    (line,) = session.trajectories()
    assert len(line.images) == 1 and line.token_ids.tolist().count(IMAGE_ID) == 4
