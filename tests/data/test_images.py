"""Images of rows and chats: five public layouts, marks against images, and what cannot be read."""

from __future__ import annotations

import base64
import io
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from milescli.commands.show.data import as_payload
from milescli.console.output import Mode, Output
from milescli.core.errors import DataError
from milescli.data.chat_masks import demonstration_trajectories, truncated
from milescli.data.examples import load_examples
from milescli.data.images import ANY_MODEL_IMAGES, collapsed
from milescli.data.prompt_encoder import PromptEncoder, TokenlessEncoder
from milescli.data.prompt_source import load_source
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tokenizer import ChatTokenizer, load_tokenizer
from milescli.models.scratch import write_config
from milescli.recipe.data import Data
from milescli.recipe.model import ScratchModel
from milescli.runtime.inputs.data_check import check_file_alone

IMAGE_ID = 5


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Of a scratch model that sees images."""
    folder = tmp_path_factory.mktemp("model")
    make_scratch_tokenizer(["What is it? A red one."], 300, folder, sees_images=True)
    write_config(ScratchModel(family="qwen2_5_vl"), folder)
    return load_tokenizer(folder)


def png(side: int = 56, colour: str = "red", **options: Any) -> bytes:
    """A file; of 56 pixels four tokens, of 28 one."""
    buffer = io.BytesIO()
    Pillow.new("RGB", (side, side), colour).save(buffer, format="PNG", **options)
    return buffer.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "a.png").write_bytes(png())
    (folder / "b.png").write_bytes(png(28, "blue"))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(path: Path, tokenizer: PromptEncoder, **keys: Any) -> list[Any]:
    data = Data(prompts=str(path), **keys)
    loaded = load_source(
        data, "prompts", tokenizer=tokenizer, seed=0, base_dir=path.parent, needs_label=None
    )
    return loaded.source.first()


TWO = {"images": ["a.png", "b.png"]}
USER = [{"role": "user", "content": "<image>Is it <image>?"}]
PART = {"type": "text", "text": "Is it "}
LAYOUTS = {
    "verl": {
        "prompt": USER, "reward_model": {"style": "rule", "ground_truth": "4"}, **TWO,
        "data_source": "geo3k", "ability": "math",
    },
    "LLaVA": {
        "id": "1", "image": ["a.png", "b.png"],
        "conversations": [{"from": "human", "value": "<image>Is it <image>?"}],
    },
    "ms-swift": {"messages": USER, "solution": "4", **TWO},
    "OpenAI": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url(png())}},
                    PART,
                    {"type": "image_url", "image_url": {"url": url(png(28, "blue"))}},
                    {"type": "text", "text": "?"},
                ],
            }
        ]
    },
    "TRL": {
        "prompt": [
            {
                "role": "user",
                "content": [{"type": "image"}, PART, {"type": "image"}, {**PART, "text": "?"}],
            }
        ],
        "images": [
            {"bytes": None, "path": "a.png"},
            {"bytes": base64.b64encode(png(28, "blue")).decode(), "path": None},
        ],
    },
    "Qwen": {
        "messages": [
            {
                "role": "user",
                "content": [{"image": "a.png"}, PART, {"image": "b.png"}, {"text": "?"}],
            }
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_of_public_layouts_stand_where_their_marks_do(
    layout: str, tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    prompt = prompts(written(tmp_path, LAYOUTS[layout]), tokenizer)[0]
    first, second = prompt.image_spans
    assert (first.num_tokens, second.num_tokens) == (4, 1)
    assert [image.sha256 for image in prompt.images] == [first.sha256, second.sha256]
    for span in prompt.image_spans:
        shown = prompt.token_ids[span.start : span.start + span.num_tokens]
        assert shown == [IMAGE_ID] * span.num_tokens
    assert prompt.token_ids.count(IMAGE_ID) == 5
    assert collapsed(prompt.token_ids, prompt.image_spans).count(IMAGE_ID) == 2
    between = prompt.token_ids[first.start + 4 : second.start]
    assert "Is it " in tokenizer.inner.decode(between)
    assert prompt.text == "<image>Is it <image>?"


def test_bytes_in_parquet_and_images_without_marks(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    path = tmp_path / "a.parquet"
    images = [{"bytes": png(), "path": "x.png"}, {"bytes": png(28), "path": None}]
    row = {"prompt": "What is it?", "images": images, "answer": "4"}
    pq.write_table(pa.Table.from_pylist([row, {**row, "images": []}]), path)
    shown, plain = prompts(path, tokenizer)
    assert [span.num_tokens for span in shown.image_spans] == [4, 1]
    assert shown.text == "<image><image>What is it?"
    assert not plain.images and plain.text == "What is it?"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "<image>a", **TWO}, "1 marks `<image>` but 2 images"),
        ({"prompt": "<image><image><image>a", **TWO}, "3 marks `<image>` but 2 images"),
        ({"prompt": "<image>a", "images": []}, "1 marks `<image>` but 0 images"),
        ({"prompt": "a", "images": ["gone.png"]}, "gone.png: No such file"),
        ({"prompt": "a", "images": ["rows.jsonl"]}, "cannot be read"),
        ({"prompt": "a", "images": ["https://x.org/a.png"]}, "remote: download the image"),
        ({"prompt": "a", "images": [url(png()[:40])]}, "cannot be read"),
        ({"prompt": "a", "images": ["data:image/png;base64,AAA"]}, "not valid base64"),
        (
            {"prompt": "a", "images": [7]},
            "an image must be a path, a data URL or bytes, not a number",
        ),
        ({"prompt": "a", "images": [url(png(9000))]}, "is too large"),
    ],
)
def test_rows_whose_images_cannot_be_used_are_named(
    row: dict[str, Any], why: str, tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    path = written(tmp_path, {"prompt": "a", "images": ["a.png"]}, row)
    with pytest.raises(DataError) as refused:
        prompts(path, tokenizer)
    assert "line 2: " in refused.value.why and why in refused.value.why


def test_a_model_that_sees_no_images_refuses_them(tmp_path: Path) -> None:
    make_scratch_tokenizer(["a"], 300, tmp_path / "model")
    blind = load_tokenizer(tmp_path / "model")
    with pytest.raises(DataError, match="column `images`"):
        prompts(written(tmp_path, {"prompt": "a", **TWO}), blind)
    with pytest.raises(DataError) as refused:
        prompts(written(tmp_path, LAYOUTS["OpenAI"]), blind)
    assert "only text is supported" in refused.value.why
    kept = prompts(
        written(tmp_path, {"prompt": "a <image>", **TWO}), blind, ignore_columns="images"
    )
    assert kept[0].text == "a <image>"


def test_demonstrations_chats_and_pairs_show_their_images(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    answer = {"role": "assistant", "content": "A red one."}
    row = {"prompt": USER, "demonstration": "A red one.", "label": "4", **TWO}
    prompt = prompts(written(tmp_path, row), tokenizer)[0]
    (worked,) = demonstration_trajectories(prompt, tokenizer)
    chats = {"messages": [*USER, answer], **TWO}
    lines, _ = load_examples(
        Data(train=str(written(tmp_path, chats))), "train", kind="chats", tokenizer=tokenizer
    )
    pair = {"prompt": USER, "chosen": [answer], "rejected": [{**answer, "content": "No."}], **TWO}
    pairs, _ = load_examples(
        Data(train=str(written(tmp_path, pair))), "train", kind="pairs", tokenizer=tokenizer
    )
    for line in (lines[0], pairs[0].chosen):
        assert line.token_ids == worked.token_ids
        assert line.loss_mask == worked.loss_mask
        assert line.image_spans == worked.image_spans == prompt.image_spans
        assert line.images == worked.images == prompt.images
    assert pairs[0].rejected.image_spans == prompt.image_spans
    start = prompt.image_spans[1].start
    assert truncated(worked, start + 1).num_tokens == start + 1
    assert (
        truncated(worked, prompt.image_spans[0].start + 2).num_tokens == prompt.image_spans[0].start
    )


ASKED = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(png())}}]}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"turns": 1}}}],
}
ANSWER = {"role": "assistant", "content": "A red one."}
CLOSER = {"type": "image_url", "image_url": {"url": url(png(28, "blue"))}}
RESULT = {"role": "tool", "content": [{"type": "text", "text": "closer: "}, CLOSER]}
MARKED = [{**ASKED, "content": [{"type": "image"}]}, CALL,
          {**RESULT, "content": "closer: <image>"}]  # fmt: skip
BLOCK = {"type": "base64", "data": base64.b64encode(png(28, "blue")).decode()}
BLOCKS = [
    {"type": "text", "text": "closer: "},
    {"type": "image", "source": {**BLOCK, "media_type": "image/png"}},
]
OF_TOOLS = {
    "OpenAI": {"messages": [ASKED, CALL, RESULT, ANSWER]},
    "TRL": {"prompt": MARKED[:1], "completion": [*MARKED[1:], ANSWER], **TWO},
    "a column": {"messages": [*MARKED, ANSWER], **TWO},
    "responses": {"prompt": [ASKED], "completion": [CALL, RESULT, ANSWER]},
    "that repeat the prompt": {"prompt": [ASKED], "completion": [ASKED, CALL, RESULT, ANSWER]},
    "Anthropic": {
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "name": "look", "input": {"turns": 1}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "content": BLOCKS}]},
            ANSWER,
        ]
    },
}


@pytest.mark.parametrize("layout", OF_TOOLS)
def test_images_of_tools_stand_in_their_turns_and_are_not_learned(
    layout: str, tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    data = Data(train=str(written(tmp_path, OF_TOOLS[layout])))
    (line,), _ = load_examples(data, "train", kind="chats", tokenizer=tokenizer)
    _require_both_images(line, tokenizer)


def _require_both_images(line: Any, tokenizer: ChatTokenizer) -> None:
    """The image of the user and that of the tool, between what the assistant wrote."""
    first, second = line.image_spans
    assert (first.num_tokens, second.num_tokens) == (4, 1)
    assert [image.sha256 for image in line.images] == [first.sha256, second.sha256]
    assert line.token_ids[second.start] == IMAGE_ID
    before = tokenizer.inner.decode(line.token_ids[first.start + 4 : second.start])
    assert "<tool_call>" in before and "tool\ncloser: " in before
    pairs = zip(line.token_ids, line.loss_mask, strict=True)
    learned = tokenizer.inner.decode([token for token, is_learned in pairs if is_learned])
    assert learned.count("<tool_call>") == 1 and learned.endswith("A red one.<|im_end|>")
    assert "closer" not in learned and "image_pad" not in learned


def test_demonstrations_show_the_images_of_their_tools(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    own = {"prompt": [ASKED], "demonstration": [CALL, RESULT, ANSWER], "label": "4"}
    listed = {"prompt": MARKED[:1], "demonstration": [*MARKED[1:], ANSWER], "label": "4", **TWO}
    for row in (own, listed):
        (prompt,) = prompts(written(tmp_path, row), tokenizer)
        (shown,) = prompt.image_spans
        assert [image.sha256 for image in prompt.images] == [shown.sha256]
        (line,) = demonstration_trajectories(prompt, tokenizer)
        _require_both_images(line, tokenizer)
    with pytest.raises(DataError) as refused:
        prompts(written(tmp_path, {**listed, "images": ["a.png"]}), tokenizer)
    assert "it has 2 marks `<image>` but 1 images" in refused.value.why


def test_each_side_of_a_pair_shows_the_images_of_its_own_tools(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    other = {**ANSWER, "content": "No."}
    row = {"prompt": [ASKED], "chosen": [CALL, RESULT, ANSWER], "rejected": [other]}
    whole = {"chosen": [ASKED, CALL, RESULT, ANSWER], "rejected": [ASKED, other]}
    for each in (row, whole):
        data = Data(train=str(written(tmp_path, each)))
        (pair,), _ = load_examples(data, "train", kind="pairs", tokenizer=tokenizer)
        _require_both_images(pair.chosen, tokenizer)
        assert [span.num_tokens for span in pair.rejected.image_spans] == [4]


def test_equal_texts_with_other_images_are_other_prompts(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    rows = [{"prompt": "a", "images": [name]} for name in ("a.png", "c.png", "a.png")]
    (tmp_path / "c.png").write_bytes(png(colour="green"))
    made = prompts(written(tmp_path, *rows), tokenizer, dedup="exact")
    assert [prompt.index for prompt in made] == [0, 1]
    assert made[0].token_ids == made[1].token_ids and made[0].identity != made[1].identity


TEXT_ONLY = "{% for m in messages %}[{{ m.role }}] {{ m.content + '' }}\n{% endfor %}[assistant] "


@pytest.mark.parametrize("template", [TEXT_ONLY, "none"])
def test_a_template_that_takes_text_alone_gets_the_tokens_of_marks(
    template: str, tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    if template != "none":
        (tmp_path / "chat.jinja").write_text(template)
        template = str(tmp_path / "chat.jinja")
    plain = load_tokenizer(tokenizer.folder, chat_template=template)
    row = {"prompt": "<image>Is it <image>?", "response": "No.", **TWO}
    path = written(tmp_path, row)
    prompt = prompts(path, plain, chat_template=template)[0]
    text = plain.inner.decode(collapsed(prompt.token_ids, prompt.image_spans))
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"{mark}Is it {mark}?" in text
    lines, _ = load_examples(Data(train=str(path)), "train", kind="chats", tokenizer=plain)
    assert lines[0].token_ids[: len(prompt.token_ids)].tolist() == prompt.token_ids
    assert lines[0].image_spans == prompt.image_spans


@pytest.mark.parametrize("kind", ["prompts", "train"])
def test_a_text_that_spells_the_token_of_an_image_is_refused(
    kind: str, tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    path = written(tmp_path, {"prompt": "a <|image_pad|>", "response": "b"})
    with pytest.raises(DataError) as refused:
        if kind == "prompts":
            prompts(path, tokenizer)
        else:
            load_examples(Data(train=str(path)), "train", kind="chats", tokenizer=tokenizer)
    assert "its text contains the image token" in refused.value.why


class _Serves(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = png() if self.path == "/a.png" else b""
        self.send_response(200 if data else 404)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_images_at_addresses_are_fetched_once_where_a_key_says_so(
    tmp_path: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ThreadingHTTPServer(("127.0.0.1", 0), _Serves) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_port}"
        path = written(tmp_path, {"prompt": "a", "images": [f"{at}/a.png"]})
        with pytest.raises(DataError) as refused:
            prompts(path, tokenizer)
        assert "data.remote_images=true" in refused.value.why
        prompt = prompts(path, tokenizer, remote_images=True)[0]
        gone = written(tmp_path, {"prompt": "a", "images": [f"{at}/b.png"]})
        with pytest.raises(DataError) as refused:
            prompts(gone, tokenizer, remote_images=True)
        assert f"cannot fetch {at}/b.png: 404" in refused.value.why
        server.shutdown()
    again = prompts(
        written(tmp_path, {"prompt": "a", "images": [f"{at}/a.png"]}),
        tokenizer,
        remote_images=True,
    )[0]
    assert again.images == prompt.images and len(prompt.images) == 1


def test_without_a_tokenizer_images_are_checked_alone(tmp_path: Path) -> None:
    unknown = TokenlessEncoder(images=ANY_MODEL_IMAGES)
    assert prompts(written(tmp_path, {"prompt": "a", **TWO}), unknown)[0].text == "<image><image>a"
    with pytest.raises(DataError) as refused:
        prompts(written(tmp_path, {"prompt": "a", "images": ["rows.jsonl"]}), unknown)
    assert "cannot be read" in refused.value.why


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_a_check_shows_the_images_of_a_file(
    sees: bool, learned: bool, tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    answer = [{"role": "assistant", "content": "No."}] if learned else []
    row = {"messages": [*USER, *answer], "answer": "4", **TWO}
    check = check_file_alone(
        str(written(tmp_path, row, row)),
        prompt_key=None,
        label_key=None,
        model=tokenizer.folder if sees else None,
        output=Output(Mode.QUIET),
    )
    assert not check.problems
    seen = as_payload(check)["parts"][0]["images"]
    if not sees:
        assert seen is None and "has images" in check.warnings[0]
        return
    assert (seen["num_images"], seen["num_rows"], seen["num_different"]) == (4, 2, 2)
    assert (seen["smallest"], seen["largest"]) == ((28, 28), (56, 56))
    assert (seen["tokens_min"], seen["tokens_max"], seen["tokens"]) == (1, 4, 10)
