"""Prompts that are more than a text: chats with tools, and tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milescli.core.errors import DataError
from milescli.core.types import Prompt
from milescli.data import prompt_source
from milescli.data.prompt_source import load_source
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.data import Data

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }}){% endfor %}{% endfor %}<assistant>"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "2 + 2?"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{}"}}],
}
TOLD = {"role": "tool", "content": "4", "name": "add"}
Load = Callable[..., list[Prompt]]


@pytest.fixture(params=["kept", "mapped"])
def load(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tokenizer: ChatTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> Load:
    """Prompts of a file, of small ones and as of large ones."""
    monkeypatch.setattr(tokenizer, "template", TEMPLATE)
    if request.param == "mapped":
        monkeypatch.setattr(prompt_source, "LARGE_ROWS", 0)

    def load(path: Path, **changes: Any) -> list[Prompt]:
        data = Data(prompts=str(path), **changes)
        made = load_source(data, "prompts", tokenizer=tokenizer, seed=0, base_dir=tmp_path).source
        return made.first()

    return load


def _text(prompt: Prompt, tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode(prompt.token_ids)


def test_tools_and_their_calls_are_told_by_the_template(
    load: Load, jsonl: Callable[..., Path], tokenizer: ChatTokenizer
) -> None:
    rows = [
        {"messages": [ASKED, CALLED, TOLD], "tools": [ADD], "label": "4"},
        {"messages": [ASKED], "tools": None, "label": "4"},
        {"messages": [ASKED], "tools": json.dumps([ADD]), "label": "4"},
    ]
    whole, bare, other = load(jsonl(*rows))
    assert _text(whole, tokenizer) == "[add]<user>2 + 2?<assistant>(add)<tool>4<assistant>"
    assert _text(bare, tokenizer) == "<user>2 + 2?<assistant>"
    assert _text(other, tokenizer) == "[add]<user>2 + 2?<assistant>"
    assert [turn["role"] for turn in whole.messages] == ["user", "assistant", "tool"]
    assert whole.messages[2]["name"] == "add"
    assert (list(whole.tools), list(bare.tools)) == ([ADD], [])
    assert (bare.turns, bare.messages) == ((), [ASKED])


def test_content_in_parts_is_their_text(
    load: Load, jsonl: Callable[..., Path], tokenizer: ChatTokenizer
) -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
    (prompt,) = load(jsonl({"messages": [{"role": "user", "content": parts}], "label": "4"}))
    assert (prompt.text, _text(prompt, tokenizer)) == ("2 + 2?", "<user>2 + 2?<assistant>")


def test_tokens_are_the_prompt_as_they_are(
    load: Load, jsonl: Callable[..., Path], tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    ids = tokenizer.inner("What is 2 + 2?")["input_ids"]
    rows = [{"prompt": ids, "label": "4"}, {"prompt": [*ids, ids[0]], "label": "4"}]
    prompts = load(jsonl(*rows), system_prompt="Be brief.")
    assert [prompt.token_ids for prompt in prompts] == [ids, [*ids, ids[0]]]
    assert prompts[0].text == "What is 2 + 2?"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    assert load(tmp_path / "data.parquet") == prompts
    assert len(load(jsonl(rows[0], rows[0]), dedup="exact")) == 1


def test_a_token_beyond_the_vocabulary_is_refused(
    load: Load, jsonl: Callable[..., Path], tokenizer: ChatTokenizer
) -> None:
    rows = [{"prompt": [size], "label": "4"} for size in (1, tokenizer.vocab_size)]
    with pytest.raises(DataError, match=r"row 2 of .* a token that the model does not have"):
        load(jsonl(*rows))


def test_tools_that_nobody_would_be_told_of_are_refused(
    load: Load,
    jsonl: Callable[..., Path],
    tokenizer: ChatTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"prompt": "2 + 2?", "label": "4"}, {"prompt": "a", "tools": [ADD], "label": "4"}]
    path = jsonl(*rows)
    for template, told in (("{{ messages }}", "would not tell the model"), (None, "rejects row 2")):
        monkeypatch.setattr(tokenizer, "template", template)
        with pytest.raises(DataError, match=told):
            load(path)
