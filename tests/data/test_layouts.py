"""Tests of the layouts that are recognised: rows in the shape of each, and what is read of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milescli.core.errors import DataError
from milescli.data.example_rows import Chat, ExampleForm, ExampleRow
from milescli.data.file_rows import FileRows, read_file
from milescli.data.layouts import LAYOUTS, recognise, use_of
from milescli.data.rows import RowForm
from milescli.data.tables import Table
from milescli.recipe.data import Data
from milescli.recipe.data_files import DataFile


def _turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASK, TELL, WRONG = _turn("user", "2+2?"), _turn("assistant", "4"), _turn("assistant", "5")
HUMAN, GPT = {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}
PLAIN = "user: 2+2?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
HH = "\n\nHuman: 2+2?\n\nAssistant:"
CALLED = "user: 2+2? | assistant: weather(city=Rome)"
CALL = {"name": "weather", "arguments": {"city": "Rome"}}

PROMPTS: list[tuple[str, dict[str, Any], str, str | None]] = [
    (
        "verl",
        {
            "data_source": "gsm8k",
            "prompt": [ASK],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 0, "answer": "#### 4"},
        },
        PLAIN,
        "4",
    ),
    (
        "verl",
        {"prompt": [_turn("system", "Brief."), ASK], "reward_model": {"ground_truth": 4}},
        f"system: Brief. | {PLAIN}",
        "4",
    ),
    (
        "DAPO-Math-17k, processed",
        {
            "prompt": "2+2?",
            "solution": "4",
            "source_prompt": [_turn("user", "Solve: 2+2? Think.")],
            "reward_model": {"ground_truth": "4", "style": "rule"},
        },
        PLAIN,
        "4",
    ),
    ("slime, Miles", {"prompt": "2+2?", "label": "4", "metadata": {"a": 1}}, PLAIN, "4"),
    ("slime, Miles", {"prompt": [ASK], "label": "4", "tools": [TOOL]}, f"{PLAIN} +weather", "4"),
    ("TRL prompt-only", {"prompt": [ASK]}, PLAIN, None),
    ("TRL prompt-only", {"prompt": "2+2?", "solution": "4"}, PLAIN, "4"),
    ("ms-swift GRPO", {"messages": [ASK], "solution": "4"}, PLAIN, "4"),
    ("OpenAI, answered", {"messages": [ASK], "answer": "4"}, PLAIN, "4"),
    (
        "verifiers",
        {"prompt": [ASK], "question": "2+2?", "answer": "4", "info": {}, "task": "sums"},
        PLAIN,
        "4",
    ),
    ("verifiers", {"question": "2+2?", "answer": "4", "info": "{}"}, PLAIN, "4"),
    ("verifiers", {"question": "2+2?", "answer": "4", "task": "sums"}, PLAIN, "4"),
    (
        "PrimeIntellect",
        {"problem_id": "a", "prompt": "2+2?", "verification_info": '{"ground_truth": "4"}'},
        PLAIN,
        "4",
    ),
    ("AReaL", {"prompt": "2+2?", "query_id": "a", "solutions": ["4"], "task": "m"}, PLAIN, "4"),
    (
        "AReaL, code",
        {"prompt": "2+2?", "query_id": "a", "input_output": '{"inputs": []}'},
        PLAIN,
        '{"inputs": []}',
    ),
    (
        "ROLL",
        {
            "id": "1",
            "prompt": "2+2?",
            "messages": json.dumps([ASK]),
            "ground_truth": "4",
            "tag": "math",
        },
        PLAIN,
        "4",
    ),
    (
        "OpenRLHF",
        {"context_messages": [ASK], "context": "2+2?", "label": "4"},
        PLAIN,
        "4",
    ),
    ("GSM8K", {"question": "2+2?", "answer": "4"}, PLAIN, "4"),
    ("MATH", {"problem": "2+2?", "level": "1", "type": "a", "solution": "4"}, PLAIN, "4"),
    (
        "OpenR1-Math",
        {"problem": "2+2?", "solution": "so 4", "answer": "4", "messages": [ASK, TELL]},
        PLAIN,
        "4",
    ),
    (
        "NuminaMath",
        {"source": "a", "problem": "2+2?", "solution": "so 4", "messages": [ASK, TELL]},
        PLAIN,
        "so 4",
    ),
    ("MATH with answers", {"problem": "2+2?", "solution": "so 4", "answer": "4"}, PLAIN, "4"),
    ("Big-Math", {"prompt": "2+2?", "solution": "so 4", "answer": "4"}, PLAIN, "4"),
    ("DeepMath", {"question": "2+2?", "final_answer": "4", "r1_solution_1": "so"}, PLAIN, "4"),
    ("APPS", {"question": "2+2?", "input_output": "{}", "starter_code": ""}, PLAIN, "{}"),
    (
        "SQuAD",
        {"question": "2+2?", "context": "A book.", "answers": {"text": ["4"], "start": [1]}},
        f"{PLAIN}¶A book.",
        "4",
    ),
    (
        "HumanEval",
        {"task_id": "a", "prompt": "2+2?", "test": "assert", "entry_point": "f"},
        PLAIN,
        None,
    ),
]
"""Layout, a row of it, and the prompt and the label that are read."""

CHATS: list[tuple[str, dict[str, Any], str]] = [
    ("Alpaca", {"instruction": "2+2?", "input": "", "output": "4"}, f"{PLAIN} | assistant: 4"),
    (
        "Alpaca",
        {
            "instruction": "Add",
            "input": "2+2",
            "output": "4",
            "system": "Brief.",
            "history": [["1+1?", "2"]],
        },
        "system: Brief. | user: 1+1? | assistant: 2 | user: Add¶2+2 | assistant: 4",
    ),
    (
        "Dolly",
        {"instruction": "2+2?", "context": "A book.", "response": "4", "category": "qa"},
        f"{PLAIN}¶A book. | assistant: 4",
    ),
    (
        "OpenOrca",
        {"system_prompt": "Brief.", "question": "2+2?", "response": "4"},
        f"system: Brief. | {PLAIN} | assistant: 4",
    ),
    (
        "ms-swift",
        {"system": "Brief.", "query": "2+2?", "response": "4", "history": [["a", "b"]]},
        f"system: Brief. | user: a | assistant: b | {PLAIN} | assistant: 4",
    ),
    (
        "ShareGPT",
        {"system": "Brief.", "conversations": [HUMAN, GPT]},
        f"system: Brief. | {PLAIN} | assistant: 4",
    ),
    (
        "ShareGPT",
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "sunny"},
                GPT,
            ],
            "tools": json.dumps([TOOL["function"]]),
        },
        f"{CALLED} | tool: sunny | assistant: 4 +weather",
    ),
    (
        "ShareGPT of ms-swift",
        {"conversation": [{"human": "2+2?", "assistant": "4"}]},
        f"{PLAIN} | assistant: 4",
    ),
    (
        "OpenAI messages",
        {"messages": [ASK, _turn("assistant", [{"type": "text", "text": "4"}])]},
        f"{PLAIN} | assistant: 4",
    ),
    (
        "OpenAI messages",
        {
            "messages": [
                ASK,
                _turn("assistant", "", tool_calls=[{"type": "function", "function": CALL}]),
                _turn("tool", "sunny"),
                TELL,
            ],
            "tools": [TOOL],
        },
        f"{CALLED} | tool: sunny | assistant: 4 +weather",
    ),
    (
        "OpenAI messages",
        {
            "messages": [
                ASK,
                _turn("tool_call", json.dumps(CALL)),
                _turn("tool_call", json.dumps(CALL)),
                _turn("tool_response", "sunny"),
                TELL,
            ],
            "tools": json.dumps([TOOL]),
        },
        f"{CALLED},weather(city=Rome) | tool: sunny | assistant: 4 +weather",
    ),
    (
        "Anthropic messages",
        {
            "system": "Brief.",
            "messages": [
                ASK,
                _turn(
                    "assistant",
                    [{"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}],
                ),
                _turn(
                    "user",
                    [{"type": "tool_result", "tool_use_id": "1", "content": "sunny"}],
                ),
                TELL,
            ],
            "tools": [{"name": "weather", "input_schema": CITY}],
        },
        f"system: Brief. | {CALLED} | tool: sunny | assistant: 4 +weather",
    ),
    (
        "Gemini",
        {
            "systemInstruction": {"parts": [{"text": "Brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "2+2?"}]},
                {"role": "model", "parts": [{"text": "4"}]},
            ],
        },
        f"system: Brief. | {PLAIN} | assistant: 4",
    ),
    (
        "xlam function calling",
        {
            "id": 1,
            "query": "2+2?",
            "answers": json.dumps([CALL]),
            "tools": json.dumps([{"name": "weather", "parameters": {"city": {"type": "str"}}}]),
        },
        f"{CALLED} +weather",
    ),
    (
        "UltraChat",
        {"prompt": "2+2?", "prompt_id": "a", "messages": [ASK, TELL]},
        f"{PLAIN} | assistant: 4",
    ),
    ("chat", {"conversation": [ASK, TELL], "model": "a"}, f"{PLAIN} | assistant: 4"),
    ("chat", {"conversations": [ASK, TELL]}, f"{PLAIN} | assistant: 4"),
    (
        "TRL prompt and completion",
        {"prompt": [ASK], "completion": [TELL]},
        f"{PLAIN} | assistant: 4",
    ),
    ("TRL prompt and completion", {"prompt": "2+2?", "completion": "4"}, f"{PLAIN} | assistant: 4"),
    ("verl SFT", {"prompt": "2+2?", "response": "4"}, f"{PLAIN} | assistant: 4"),
    ("NeMo SFT", {"input": "2+2?", "output": "4"}, f"{PLAIN} | assistant: 4"),
    ("TRL language modeling", {"text": "2+2 is 4"}, "2+2 is 4"),
    (
        "OpenMathInstruct",
        {"problem": "2+2?", "generated_solution": "4", "expected_answer": "4"},
        f"{PLAIN} | assistant: 4",
    ),
]
"""Layout, a row of it, and what is learned from, tools behind it."""

PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("TRL preference", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}),
    ("TRL preference", {"prompt": [ASK], "chosen": [TELL], "rejected": [WRONG]}),
    ("TRL preference, implicit prompt", {"chosen": [ASK, TELL], "rejected": [ASK, WRONG]}),
    (
        "UltraFeedback",
        {
            "prompt": "2+2?",
            "chosen": [ASK, TELL],
            "rejected": [ASK, WRONG],
            "messages": [ASK, TELL],
            "score_chosen": 9.0,
        },
    ),
    ("HH", {"chosen": f"{HH} 4", "rejected": f"{HH} 5"}),
    ("HH", {"chosen": f"{HH} 4".strip(), "rejected": f"{HH} 5".strip()}),
    ("HH with a prompt", {"prompt": HH, "chosen": " 4", "rejected": " 5"}),
    ("Orca DPO pairs", {"system": "", "question": "2+2?", "chosen": "4", "rejected": "5"}),
    (
        "LLaMA-Factory preference",
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "5"}},
    ),
    ("XTuner preference", {"chosen_messages": [ASK, TELL], "rejected_messages": [ASK, WRONG]}),
    (
        "Argilla preference",
        {"instruction": "2+2?", "chosen_response": "4", "rejected_response": "5"},
    ),
    ("preference by name", {"question": "2+2?", "chosen": "4", "rejected": "5"}),
    ("ms-swift preference", {"messages": [ASK, TELL], "rejected_response": "5"}),
    ("ms-swift preference", {"messages": [ASK, TELL], "rejected_messages": [ASK, WRONG]}),
    (
        "OpenAI preference",
        {
            "input": {"messages": [ASK], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [TELL],
            "non_preferred_output": [WRONG],
        },
    ),
]
"""Layout, and a row of it; 4 is chosen and 5 rejected."""

JUDGED = [
    ("TRL unpaired preference", {"prompt": "2+2?", "completion": "4", "label": True}),
    ("ms-swift KTO", {"messages": [ASK, TELL], "label": True}),
]

REFUSED = [
    ("TRL stepwise supervision", {"prompt": "a", "completions": ["b"], "labels": [True]}),
    ("SHP", {"history": "a", "human_ref_A": "b", "human_ref_B": "c", "labels": 1}),
    ("PKU-SafeRLHF", {"prompt": "a", "response_0": "b", "response_1": "c"}),
    ("OpenAssistant tree", {"message_id": "1", "parent_id": "0", "text": "a", "role": "user"}),
    ("Glaive function calling", {"system": "a", "chat": "USER: b"}),
]


def _written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _prompts(path: Path, **keys: Any) -> FileRows:
    form = RowForm(**{"field": "prompts", "needs_label": False, **keys})
    return read_file(Table(path), DataFile(name=str(path)), form, folder=path.parent)


def _learned(path: Path, kind: Any, **keys: Any) -> list[ExampleRow]:
    form = ExampleForm(field="train", kind=kind, data=Data(train=str(path), **keys))
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


@pytest.mark.parametrize(("name", "row", "text"), CHATS)
def test_chats_of_a_known_layout_need_no_key(
    tmp_path: Path, name: str, row: dict[str, Any], text: str
) -> None:
    assert recognise(row).name == name and use_of(row) == "chats"
    (read,) = _learned(_written(tmp_path, row), "chats")
    assert _text_of(read.chosen) == text


@pytest.mark.parametrize(("name", "row"), PAIRS)
def test_pairs_of_a_known_layout_need_no_key(
    tmp_path: Path, name: str, row: dict[str, Any]
) -> None:
    assert recognise(row).name == name and use_of(row) == "pairs"
    (read,) = _learned(_written(tmp_path, row), "pairs")
    assert read.chosen and read.rejected and read.chosen.first == read.rejected.first == 1
    assert _text_of(read.chosen) == f"{PLAIN} | assistant: 4"
    assert _text_of(read.rejected) == f"{PLAIN} | assistant: 5"


@pytest.mark.parametrize(("name", "row"), JUDGED)
def test_responses_that_were_judged_alone_are_one_side(
    tmp_path: Path, name: str, row: dict[str, Any]
) -> None:
    assert recognise(row).name == name and use_of(row) == "pairs"
    good, bad = _learned(_written(tmp_path, row, {**row, "label": False}), "pairs")
    assert good.rejected is None and bad.chosen is None
    assert _text_of(good.chosen) == _text_of(bad.rejected) == f"{PLAIN} | assistant: 4"


@pytest.mark.parametrize(("name", "row"), REFUSED)
def test_a_known_layout_that_cannot_be_used_says_why(
    tmp_path: Path, name: str, row: dict[str, Any]
) -> None:
    layout = recognise(row)
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
        with pytest.raises(
            DataError, match=f"the column `{name}` of .* would be left out"
        ) as error:
            _prompts(path)
        assert error.value.fixes[0].startswith(f"--set data.ignore_columns={name} ")
        assert len(_prompts(path, ignored=frozenset([name]))) == len(rows)
        learned = _written(tmp_path, *({**row, "completion": "4"} for row in rows))
        with pytest.raises(DataError, match=f"the column `{name}` of .* would be left out"):
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
    with pytest.raises(DataError, match=r"`input\.images` of .* would be left out"):
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
        ({"prompt": [_turn("system", "a"), ASK], "system": "b"}, "`system` is one system prompt"),
        ({"prompt": [1, 2], "system": "b"}, "is tokens, in which its `system` must stand"),
        ({"prompt": "a", "system": ["b"]}, "`system` must be text, not a list"),
        ({"prompt": "a", "history": ["b"]}, "`history` must be a list of questions"),
        ({"prompt": [{"from": "critic", "value": "a"}]}, "is from `critic`, who is none of"),
        ({"prompt": [_turn("user", [{"type": "image", "text": ""}])]}, "its type is `image`"),
        ({"prompt": [_turn("user", "a", images=["b"])]}, "has `images`, and only text is read"),
        ({"prompt": [_turn("tool_call", "sunny"), ASK]}, "is no call of a tool"),
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
    rivals = {"problem": "2+2?", "question": "1+1?", "messages": [_turn("user", "3+3?")]}
    path = _written(tmp_path, {**rivals, "system": "Brief."})
    (row,) = _prompts(path, prompt_key="problem").read([0])
    assert _text(row.messages) == f"system: Brief. | {PLAIN}"
    path = _written(tmp_path, {**rivals, "images": ["a.jpg"]})
    with pytest.raises(DataError, match=r"`images` of .* would be left out"):
        _prompts(path, prompt_key="problem")


def test_a_key_may_name_a_field_of_an_object_or_of_its_json(tmp_path: Path) -> None:
    rows = [
        {"input": {"question": "2+2?"}, "extra_info": extra}
        for extra in ({"answer": "4"}, json.dumps({"answer": "4"}))
    ]
    keys = {"prompt_key": "input.question", "label_key": "extra_info.answer"}
    read = _prompts(_written(tmp_path, *rows), needs_label=True, **keys).read([0, 1])
    assert [(_text(row.messages), row.label) for row in read] == [(PLAIN, "4")] * 2
