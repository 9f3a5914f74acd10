"""Tests of the layouts that are recognised: rows in the shape of each, and what is read of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milescli.core.errors import DataError
from milescli.data.example_rows import Chat, ExampleRow, ExampleRowParser
from milescli.data.file_rows import FileRows, read_file
from milescli.data.layout_table import LAYOUTS
from milescli.data.layouts import find_layout, use_of
from milescli.data.rows import PromptRowParser
from milescli.data.tables import Table
from milescli.recipe.data import Data
from milescli.recipe.data_files import DataFile
from tests.data.layout_rows import (
    ASK,
    CHATS,
    HH,
    JUDGED,
    PAIRS,
    PLAIN,
    PROMPTS,
    REFUSED,
    TELL,
    TOOL,
    WRONG,
    said,
)


def _written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _prompts(path: Path, **keys: Any) -> FileRows:
    form = PromptRowParser(**{"field": "prompts", "needs_label": False, **keys})
    return read_file(Table(path), DataFile(name=str(path)), form, folder=path.parent)


def _learned(path: Path, kind: Any, **keys: Any) -> list[ExampleRow]:
    form = ExampleRowParser(field="train", kind=kind, data=Data(train=str(path), **keys))
    rows = read_file(Table(path), DataFile(name=str(path)), form, folder=path.parent)
    rows.require_good()
    return rows.read(range(len(rows)))


def _text(turns: Any, tools: Any = ()) -> str:
    """The turns in one line, with calls, and the names of the tools."""
    shown = []
    for turn in turns:
        calls = [call["function"] for call in turn.get("tool_calls") or ()]
        called = ",".join(
            f"{call['name']}({','.join(f'{k}={v}' for k, v in call['arguments'].items())})"
            for call in calls
        )
        shown.append(f"{turn['role']}: {turn['content']}{called}".replace("\n\n", "¶"))
    names = [tool["function"]["name"] for tool in tools]
    return " | ".join(shown) + f" +{','.join(names)}" * bool(names)


def _text_of(chat: Chat | None) -> str:
    assert chat is not None
    return chat.text or _text(chat.turns, chat.tools)


@pytest.mark.parametrize(("name", "row", "prompt", "label"), PROMPTS)
def test_prompts_of_a_known_layout_need_no_key(
    tmp_path: Path, name: str, row: dict[str, Any], prompt: str, label: str | None
) -> None:
    rows = _prompts(_written(tmp_path, row), needs_label=label is not None)
    assert rows.require_good().layout.name == name and use_of(row) == "prompts"
    (read,) = rows.read([0])
    assert (_text(read.messages, read.tools), read.label) == (prompt, label)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"choices": ["3", "4"], "answer": 2}, "is '2', but the options are 0 to 1, A to B"),
        ({"choices": ["3", "4"], "answer": -1}, "is '-1', but the options are 0 to 1, A to B"),
        ({"choices": ["3", "4"], "answer": "C"}, "is 'C', but the options"),
        ({"choices": ["1", "2"], "answer": "1"}, "could be B or A: its number or its text"),
        ({"choices": ["3"], "answer": 0}, "must contain 2 to 26 options, but has 1"),
        ({"choices": ["3", None], "answer": 0}, "must contain texts, but one is null"),
        (
            {"choices": {"text": ["3", "4"], "label": ["A", "A"]}, "answerKey": "A"},
            "contains the option A",
        ),
        (
            {"choices": {"text": ["3", "4"], "label": ["A"]}, "answerKey": "A"},
            "has 1 letters and 2 texts",
        ),
        (
            {"choices": {"text": ["3", "4"], "label": ["A", "B"]}, "answerKey": "E"},
            "is 'E', but the options are A, B",
        ),
    ],
)
def test_a_row_whose_options_or_answer_are_wrong_is_told_by_line(
    tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    good = {"choices": ["3", "4"], "answer": 1}
    if "answerKey" in row:
        good = {"choices": {"text": ["3", "4"], "label": ["A", "B"]}, "answerKey": "B"}
    path = _written(tmp_path, *({"question": "2+2?", **one} for one in (good, row)))
    with pytest.raises(DataError) as refusal:
        _prompts(path, needs_label=True).require_good()
    assert refusal.value.why.startswith("line 2: ") and says in refusal.value.why


def test_options_are_set_aside_as_other_columns_are(tmp_path: Path) -> None:
    row = {"question": "2+2?", "choices": ["3", "4"], "answer": "4"}
    path = _written(tmp_path, row)
    (read,) = _prompts(path, needs_label=True, ignored=frozenset(["choices"])).read([0])
    assert (_text(read.messages), read.label) == (PLAIN, "4")


@pytest.mark.parametrize(("name", "row", "text"), CHATS)
def test_chats_of_a_known_layout_need_no_key(
    tmp_path: Path, name: str, row: dict[str, Any], text: str
) -> None:
    assert find_layout(row).name == name and use_of(row) == "chats"
    (read,) = _learned(_written(tmp_path, row), "chats")
    assert _text_of(read.chosen) == text


@pytest.mark.parametrize(("name", "row"), PAIRS)
def test_pairs_of_a_known_layout_need_no_key(
    tmp_path: Path, name: str, row: dict[str, Any]
) -> None:
    assert find_layout(row).name == name and use_of(row) == "pairs"
    (read,) = _learned(_written(tmp_path, row), "pairs")
    assert read.chosen and read.rejected and read.chosen.first == read.rejected.first == 1
    assert _text_of(read.chosen) == f"{PLAIN} | assistant: 4"
    assert _text_of(read.rejected) == f"{PLAIN} | assistant: 5"


@pytest.mark.parametrize(("name", "row"), JUDGED)
def test_responses_that_were_judged_alone_are_one_side(
    tmp_path: Path, name: str, row: dict[str, Any]
) -> None:
    assert find_layout(row).name == name and use_of(row) == "pairs"
    good, bad = _learned(_written(tmp_path, row, {**row, "label": False}), "pairs")
    assert good.rejected is None and bad.chosen is None
    assert _text_of(good.chosen) == _text_of(bad.rejected) == f"{PLAIN} | assistant: 4"


@pytest.mark.parametrize(("name", "row"), REFUSED)
def test_a_known_layout_that_cannot_be_used_says_why(
    tmp_path: Path, name: str, row: dict[str, Any]
) -> None:
    layout = find_layout(row)
    with pytest.raises(DataError, match=f"layout of {name}: .*{layout.refused[:20]}"):
        _learned(_written(tmp_path, row), layout.use)


def test_each_layout_has_a_row_here_and_stands_in_the_docs() -> None:
    rows = (*PROMPTS, *CHATS, *PAIRS, *JUDGED, *REFUSED)
    names = {layout.name for layout in LAYOUTS}
    assert {row[0] for row in rows} == names
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    flat = " ".join(page.split())
    assert not [name for name in names if name not in flat]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("images", ["a.jpg"]),
        ("image", {"bytes": "AAAA", "path": None}),
        ("photo_of_it", {"bytes": "AAAA", "path": "a.jpg"}),
        ("videos", ["a.mp4"]),
        ("audio", {"array": [0.1], "path": None, "sampling_rate": 16000}),
        ("choices", ["a", "b"]),
        ("context", "A book."),
        ("input", "2 and 2"),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_a_column_of_the_prompt_that_is_not_read_stops_the_run_unless_it_is_set_aside(
    tmp_path: Path, name: str, value: Any
) -> None:
    good = {"prompt": "2+2?", "label": "4"}
    for other in ({}, {name: None}, {name: []}, {name: ""}):
        assert len(_prompts(_written(tmp_path, {**good, **other}))) == 1
    for rows in ([{**good, name: value}], [good, {**good, name: value}]):
        path = _written(tmp_path, *rows)
        with pytest.raises(DataError, match=f"the column `{name}` of .* would be ignored") as error:
            _prompts(path)
        assert error.value.fixes[0].startswith(f"--set data.ignore_columns={name} ")
        assert len(_prompts(path, ignored=frozenset([name]))) == len(rows)
        learned = _written(tmp_path, *({**row, "completion": "4"} for row in rows))
        with pytest.raises(DataError, match=f"the column `{name}` of .* would be ignored"):
            _learned(learned, "chats")
        assert len(_learned(learned, "chats", ignore_columns=name)) == len(rows)


def test_an_image_in_a_later_row_or_beside_a_field_that_is_read_is_not_left_out(
    tmp_path: Path,
) -> None:
    image = {"bytes": b"x", "path": None}
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"prompt": ["a", "b"], "pic": pa.array([None, image], kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"`pic` of .* holds an image, a sound or a video"):
        _prompts(tmp_path / "a.parquet")
    good = {"input": {"messages": [ASK]}}
    path = _written(tmp_path, good, {"input": {"messages": [ASK], "images": ["a.jpg"]}})
    with pytest.raises(DataError, match=r"`input\.images` of .* would be ignored"):
        _prompts(path, prompt_key="input.messages")
    ignored = frozenset(["input.images"])
    assert len(_prompts(path, prompt_key="input.messages", ignored=ignored)) == 2


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "2+2?", "system": "Brief."}, f"system: Brief. | {PLAIN}"),
        ({"prompt": [ASK], "system_prompt": "Brief."}, f"system: Brief. | {PLAIN}"),
        ({"prompt": "2+2?", "system": " "}, PLAIN),
        ({"instruction": "Add", "input": "2+2"}, "user: Add¶2+2"),
        ({"instruction": "Add", "input": None}, "user: Add"),
        (
            {"prompt": "2+2?", "history": json.dumps([["a", "b"]])},
            f"user: a | assistant: b | {PLAIN}",
        ),
        ({"prompt": json.dumps([ASK])}, PLAIN),
        ({"prompt": [json.dumps(ASK)]}, PLAIN),
        ({"prompt": "2+2?", "tools": [json.dumps(TOOL)]}, f"{PLAIN} +weather"),
        ({"prompt": "2+2?", "functions": [TOOL["function"]]}, f"{PLAIN} +weather"),
    ],
)
def test_what_stands_beside_a_prompt_is_read_in_any_row(
    tmp_path: Path, row: dict[str, Any], prompt: str
) -> None:
    first = {("instruction" if "instruction" in row else "prompt"): "hi"}
    read = _prompts(_written(tmp_path, first, row)).read([1])[0]
    assert _text(read.messages, read.tools) == prompt


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [said("system", "a"), ASK], "system": "b"}, "`system` sets a system prompt"),
        ({"prompt": [1, 2], "system": "b"}, "contains tokens, but its `system`"),
        ({"prompt": "a", "system": ["b"]}, "`system` must be text, not a list"),
        ({"prompt": "a", "history": ["b"]}, "`history` must be a list of questions"),
        ({"prompt": [{"from": "critic", "value": "a"}]}, "is from `critic`, which is not one of"),
        ({"prompt": [said("user", [{"type": "image", "text": ""}])]}, "of type `image`"),
        ({"prompt": [said("user", "a", images=["b"])]}, "has `images`, but only text is supported"),
        ({"prompt": [said("tool_call", "sunny"), ASK]}, "is not a tool call"),
    ],
)
def test_a_row_that_cannot_be_read_whole_says_why(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    (bad,) = _prompts(_written(tmp_path, {"prompt": "a"}, row)).bad
    assert bad.line == 2 and reason in bad.reason


@pytest.mark.parametrize("weight", [{"weight": 0}, {"loss": False}, {"loss_weight": 0.5}])
def test_a_turn_that_is_not_to_be_learned_as_others_is_refused(
    tmp_path: Path, weight: dict[str, Any]
) -> None:
    row = {"messages": [ASK, {**WRONG, **weight}, ASK, TELL]}
    with pytest.raises(DataError, match=f"turn 2 of `messages` has `{next(iter(weight))}`"):
        _learned(_written(tmp_path, row), "chats")


@pytest.mark.parametrize(
    ("row", "keys", "fixes"),
    [
        (
            {"prompt": "a", "reward_model": {"style": "rule", "truth": "4"}},
            {"label_key": "reward_model"},
            ["label_key=reward_model.style", "label_key=reward_model.truth"],
        ),
        ({"prompt": "a", "extra_info": {"answer": "4"}}, {}, ["label_key=extra_info.answer"]),
        ({"prompt": "a", "result": "4", "id": "1"}, {}, ["label_key=result"]),
        ({"prompt": "a"}, {}, ["rollout.reward=length"]),
        ({"prompt": "a", "my label": "4"}, {}, ["'data.label_key=my label'"]),
        (
            {"prompt": "a", "answer": "4", "target": "5"},
            {},
            ["label_key=answer", "label_key=target"],
        ),
        (
            {"query": "a", "problem": "b", "label": "1"},
            {},
            ["prompt_key=problem", "prompt_key=query"],
        ),
        ({"prompt": "a", "x": {"y": "4"}}, {"label_key": "x.z"}, ["label_key=x.y"]),
    ],
)
def test_columns_that_are_not_clear_are_refused_with_the_options_that_decide(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, str], fixes: list[str]
) -> None:
    with pytest.raises(DataError) as error:
        _prompts(_written(tmp_path, row), needs_label=True, **keys)
    assert len(error.value.fixes) == len(fixes)
    assert all(want in fix for want, fix in zip(fixes, error.value.fixes, strict=True))


@pytest.mark.parametrize("text", [HH, f"\n\nHuman: a\n\nAssistant: b{HH}", HH.strip()])
def test_a_dialogue_in_one_text_is_a_chat_unless_prompts_are_raw(tmp_path: Path, text: str) -> None:
    path = _written(tmp_path, {"prompt": text}, {"prompt": "How?"})
    chat, plain = _prompts(path).read([0, 1])
    assert _text(chat.messages).endswith(PLAIN) and _text(plain.messages) == "user: How?"
    assert _prompts(path, is_raw=True).read([0])[0].text == text


def test_a_key_of_the_prompt_sets_its_rivals_aside_and_nothing_else(tmp_path: Path) -> None:
    rivals = {"problem": "2+2?", "question": "1+1?", "messages": [said("user", "3+3?")]}
    path = _written(tmp_path, {**rivals, "system": "Brief."})
    (row,) = _prompts(path, prompt_key="problem").read([0])
    assert _text(row.messages) == f"system: Brief. | {PLAIN}"
    path = _written(tmp_path, {**rivals, "images": ["a.jpg"]})
    with pytest.raises(DataError, match=r"`images` of .* would be ignored"):
        _prompts(path, prompt_key="problem")


def test_a_key_may_name_a_field_of_an_object_or_of_its_json(tmp_path: Path) -> None:
    rows = [
        {"input": {"question": "2+2?"}, "extra_info": extra}
        for extra in ({"answer": "4"}, json.dumps({"answer": "4"}))
    ]
    keys = {"prompt_key": "input.question", "label_key": "extra_info.answer"}
    read = _prompts(_written(tmp_path, *rows), needs_label=True, **keys).read([0, 1])
    assert [(_text(row.messages), row.label) for row in read] == [(PLAIN, "4")] * 2
