"""Rows to learn from: every form of them, and what is wrong with a bad one, by line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from milescli.core.errors import DataError
from milescli.core.types import Pair, Trajectory
from milescli.data.examples import ExampleReport, Examples, load_examples
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.data import Data
from tests.data.chat_templates import CHATML, QWEN_3, tokenizer_of

USER = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}
NO = {"role": "assistant", "content": "no"}
CHAT = {"messages": [USER, HELLO]}
PAIR = {"prompt": "hi", "chosen": "hello", "rejected": "no"}
LONG_PAIR = {"chosen": [USER, HELLO], "rejected": [USER, NO]}
JUDGED = {"prompt": "hi", "completion": "hello", "label": True}
ANSWERED = {"prompt": "hi", "completion": "hello"}
ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
BE_BRIEF = "<|im_start|>system\nbe brief<|im_end|>\n"

Load = Callable[..., tuple[list[Any], ExampleReport]]


@pytest.fixture(scope="module")
def chatml() -> ChatTokenizer:
    """A token for each byte."""
    return tokenizer_of(CHATML.template, special=CHATML.special, eos=CHATML.eos)


@pytest.fixture
def load(jsonl: Callable[..., Path], chatml: ChatTokenizer) -> Load:
    """(kind, *rows, **keys of `data`) -> items and their report."""

    def loaded(kind: Any, *rows: object, **data: Any) -> Any:
        path = jsonl(*rows)
        return load_examples(
            Data(train=str(path), **data),
            "train",
            kind=kind,
            tokenizer=chatml,
        )

    return loaded


def _split(line: Trajectory, tokenizer: ChatTokenizer) -> tuple[str, str]:
    """What is before the first learned token, and what is learned."""
    start = line.loss_mask.index(1)
    learned = [token for token, on in zip(line.token_ids, line.loss_mask, strict=True) if on]
    return tuple(tokenizer.inner.decode(list(ids)) for ids in (line.token_ids[:start], learned))


@pytest.mark.parametrize(
    "row",
    [
        CHAT,
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"messages": json.dumps([USER, HELLO])},
        {"messages": [{**USER, "tool_calls": None}, {**HELLO, "tool_calls": None}], "tools": None},
        ANSWERED,
        {"question": "hi", "answer": "hello"},
        {"prompt": [USER], "completion": [HELLO]},
        {"prompt": [USER], "completion": [USER, HELLO]},
        {"text": "not this", **ANSWERED},
    ],
)
def test_a_chat_in_any_form_is_the_same_line_of_tokens(
    load: Load, chatml: ChatTokenizer, row: dict[str, Any]
) -> None:
    ((line,), report) = load("chats", row)
    assert _split(line, chatml) == (ASKED, "hello<|im_end|>")
    assert (report.tokens, report.loss_tokens) == (line.num_tokens, 6)


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"instruction": "hi", "input": "you", "output": "hello"}, "hi\n\nyou"),
        ({"instruction": "hi", "input": "", "output": "hello"}, "hi"),
        ({"instruction": "hi", "input": None, "output": "hello"}, "hi"),
    ],
)
def test_what_an_instruction_is_about_is_part_of_the_prompt(
    load: Load, chatml: ChatTokenizer, row: dict[str, Any], asked: str
) -> None:
    ((line,), _) = load("chats", row)
    assert _split(line, chatml) == (ASKED.replace("hi", asked), "hello<|im_end|>")


def test_a_plain_text_is_learned_whole_and_ends(load: Load, chatml: ChatTokenizer) -> None:
    ((line,), _) = load("chats", {"text": "hello"})
    assert _split(line, chatml) == ("h", "ello<|im_end|>")


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        LONG_PAIR,
        {**PAIR, "chosen": [HELLO]},
        {**PAIR, "prompt": [USER], "chosen": [USER, HELLO], "rejected": [USER, NO]},
    ],
)
@pytest.mark.parametrize("system_prompt", [None, "be brief"])
def test_a_pair_in_any_form_has_two_sides_to_one_prompt(
    load: Load, chatml: ChatTokenizer, row: dict[str, Any], system_prompt: str | None
) -> None:
    (((pair),), _) = load("pairs", {**row, "margin": 0.5}, system_prompt=system_prompt)
    asked = (BE_BRIEF if system_prompt else "") + ASKED
    assert isinstance(pair, Pair) and pair.margin == 0.5
    assert _split(pair.chosen, chatml) == (asked, "hello<|im_end|>")
    assert _split(pair.rejected, chatml) == (asked, "no<|im_end|>")


def test_a_pair_may_part_at_a_later_turn_of_the_assistant(
    load: Load, chatml: ChatTokenizer
) -> None:
    ((pair,), _) = load(
        "pairs", {"chosen": [USER, HELLO, USER, HELLO], "rejected": [USER, HELLO, USER, NO]}
    )
    asked = f"{ASKED}hello<|im_end|>\n{ASKED}"
    assert _split(pair.chosen, chatml) == (asked, "hello<|im_end|>")
    assert _split(pair.rejected, chatml) == (asked, "no<|im_end|>")


def test_responses_that_were_judged_alone_are_one_side(load: Load) -> None:
    (good, bad), _ = load("pairs", JUDGED, {**JUDGED, "label": 0})
    assert good.chosen is not None and good.rejected is None
    assert bad.rejected is not None and bad.chosen is None


def test_what_a_reward_model_reads_ends_where_an_engine_would_stop(
    load: Load, chatml: ChatTokenizer
) -> None:
    ((pair,), _) = load("pairs", PAIR)
    assert _split(pair.chosen, chatml)[1] == "hello<|im_end|>"


BAD_CHATS: list[tuple[object, str]] = [
    ({"messages": []}, "`messages` is an empty list"),
    ({"messages": [USER]}, "the last turn of `messages` belongs to the user"),
    ({"messages": "hi"}, "`messages` must be a list of messages, not a text"),
    ({"messages": "[{"}, "`messages` must be a list of messages, not a text"),
    ({"messages": None}, "`messages` is null"),
    ({"other": 1}, "`messages` is missing"),
    ({"messages": [USER, {**HELLO, "content": " "}]}, r"`messages\[1\]`.content is empty"),
    ({"messages": [USER, {**HELLO, "content": None}]}, r"`messages\[1\]`.content is empty"),
    ({"messages": [USER, {**HELLO, "content": 3}]}, r"`messages\[1\]`.content must be text, not"),
    ({"messages": [USER, {**HELLO, "content": ["a"]}]}, "content has a part that is not text"),
    ({"messages": [USER, {**HELLO, "role": ""}]}, r"`messages\[1\]` has no `role`"),
    ({"messages": [{"content": "hi"}, HELLO]}, r"`messages\[0\]` has no `role`"),
    ({"messages": [USER, "hello"]}, r"`messages\[1\]` must be a message"),
    ({"messages": [USER, {**HELLO, "role": "critic"}]}, "belongs to the critic"),
    ({**CHAT, "tools": "{"}, "`tools` is not JSON"),
    ({**CHAT, "tools": [1]}, "`tools` must be a list of tools"),
    ({"messages": [USER, {**HELLO, "content": "\ud800"}]}, "half of a surrogate pair"),
    ({"messages": [USER, {**HELLO, "tool_calls": "x"}]}, "UndefinedError: 'str object' has no"),
    ([1], "a row must be a JSON object, not a list"),
    (b'{"messages": [', "not JSON"),
    (b'{"messages": "\xff"}', "not UTF-8"),
]
BAD_PAIRS: list[tuple[object, str]] = [
    ({"prompt": "hi", "chosen": "hello"}, "`rejected` is missing"),
    ({**PAIR, "rejected": None}, "`rejected` is null"),
    ({**PAIR, "chosen": ""}, "`chosen` is empty"),
    ({**PAIR, "chosen": {"a": 1}}, "`chosen` must be text, not an object"),
    ({**PAIR, "chosen": []}, "`chosen` is an empty list"),
    (
        {**PAIR, "chosen": [{**USER, "content": "ho"}, HELLO]},
        "`chosen` starts with a different prompt",
    ),
    ({**PAIR, "rejected": [HELLO, USER]}, "the last turn of `rejected` belongs to the user"),
    ({**PAIR, "prompt": " "}, "`prompt` is empty"),
    ({**PAIR, "prompt": []}, "`prompt` is an empty list"),
    ({**PAIR, "prompt": True}, "`prompt` must be text, not true or false"),
    ({**PAIR, "prompt": [USER, HELLO]}, "`prompt` ends with the assistant's turn"),
    ({**PAIR, "margin": "1"}, "`margin` must be a number, but is '1'"),
    ({**PAIR, "margin": True}, "`margin` must be a number, but is True"),
    ({**PAIR, "margin": float("nan")}, "`margin` must be a number, but is nan"),
]
APART = "`chosen` and `rejected` start with different prompts"
OTHER = {**USER, "content": "ho"}
BAD_LONG_PAIRS: list[tuple[object, str]] = [
    ({"chosen": [USER, HELLO], "rejected": [OTHER, NO]}, APART),
    ({"chosen": [HELLO], "rejected": [NO]}, APART),
    ({"chosen": [USER, HELLO, USER, NO], "rejected": [USER, HELLO, OTHER, NO]}, APART),
    ({"chosen": [USER, HELLO, USER, NO], "rejected": [USER, HELLO, NO]}, APART),
    (
        {"chosen": "hello", "rejected": [USER, NO]},
        "`chosen` must be a list of messages, not a text",
    ),
    (
        {"chosen": [USER, HELLO], "rejected": [USER]},
        "the last turn of `rejected` belongs to the user",
    ),
]
BAD_JUDGED: list[tuple[object, str]] = [
    ({**JUDGED, "label": "good"}, "`label` must be true or false, but is 'good'"),
    ({**JUDGED, "label": None}, "`label` must be true or false, but is None"),
    ({**JUDGED, "label": 2}, "`label` must be true or false, but is 2"),
    ({**JUDGED, "completion": " "}, "`completion` is empty"),
]
BAD_ANSWERS: list[tuple[object, str]] = [
    ({"prompt": "hi"}, "`completion` is missing"),
    ({**ANSWERED, "completion": ["hello"]}, r"`completion\[0\]` must be a message"),
    ({**ANSWERED, "prompt": {"a": 1}}, "`prompt` must be text, not an object"),
]


@pytest.mark.parametrize(
    ("kind", "good", "bad", "reason"),
    [
        (kind, good, bad, reason)
        for kind, good, rows in (
            ("chats", CHAT, BAD_CHATS),
            ("chats", ANSWERED, BAD_ANSWERS),
            ("chats", {"text": "a"}, [({"text": ""}, "is empty"), ({"text": []}, "not a list")]),
            ("pairs", PAIR, BAD_PAIRS),
            ("pairs", LONG_PAIR, BAD_LONG_PAIRS),
            ("pairs", JUDGED, BAD_JUDGED),
        )
        for bad, reason in rows
    ],
)
def test_a_bad_row_is_named_by_its_line_and_reason(
    load: Load, kind: str, good: object, bad: object, reason: str
) -> None:
    with pytest.raises(DataError, match=rf"1 of 3 rows .* cannot be used.*line 2: .*{reason}"):
        load(kind, good, bad, good)


@pytest.mark.parametrize(
    ("kind", "row", "data", "why", "fix"),
    [
        ("chats", {"a": "b"}, {}, "no prompt column; its columns are a", "data.prompt_key=a"),
        ("chats", {"prompt": "a", "b": "c"}, {}, "no response column", "data.response_key=b"),
        ("chats", {"a": "b"}, {"prompt_key": "aa"}, "its columns are a", "data.prompt_key=a"),
        ("chats", ANSWERED, {"response_key": "complete"}, "completion", "response_key=completion"),
        ("pairs", ANSWERED, {}, "judged response has `label`", "data.train=FILE.jsonl"),
    ],
)
def test_columns_that_do_not_tell_are_refused_with_a_way_out(
    load: Load, kind: str, row: object, data: dict[str, str], why: str, fix: str
) -> None:
    with pytest.raises(DataError, match=why) as error:
        load(kind, row, **data)
    assert fix in error.value.fixes[0]


def test_an_empty_file_is_refused(load: Load, tmp_path: Path, chatml: ChatTokenizer) -> None:
    (tmp_path / "none.jsonl").write_text("")
    data = Data(train=str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"none\.jsonl is empty"):
        load_examples(data, "train", kind="chats", tokenizer=chatml)


def test_rows_behind_the_end_of_a_file_are_no_empty_file(
    load: Load, tmp_path: Path, chatml: ChatTokenizer
) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(CHAT))
    data = Data(train=f"{tmp_path}/one.jsonl[5:9]")
    with pytest.raises(DataError, match=r"one\.jsonl has no rows \[5:9\]"):
        load_examples(data, "train", kind="chats", tokenizer=chatml)


LONG = {"messages": [USER, {**HELLO, "content": "y" * 300}]}


def test_rows_that_are_too_long_are_left_out_and_counted(load: Load) -> None:
    kept, report = load("chats", CHAT, LONG, max_row_tokens=100)
    assert len(kept) == 1
    assert (report.num_rows, report.num_used, report.num_too_long) == (2, 1, 1)
    assert report.tokens_max > 300
    assert "1 of 2 rows of data.jsonl are left out (line 2: 322 tokens)" in report.note


def test_rows_that_are_too_long_are_cut_where_the_recipe_says_so(load: Load) -> None:
    buried = {"messages": [{**USER, "content": "y" * 300}, HELLO]}
    kept, report = load("chats", CHAT, LONG, buried, max_row_tokens=100, long_rows="truncate")
    assert [line.num_tokens for line in kept] == [27, 100]
    assert (report.num_cut, report.num_too_long) == (1, 1)
    assert "line 3: nothing learned in its first 100 tokens" in report.note


def test_rows_that_are_too_long_are_an_error_where_the_recipe_says_so(load: Load) -> None:
    with pytest.raises(DataError, match="line 2: 322 tokens") as error:
        load("chats", CHAT, LONG, max_row_tokens=100, long_rows="error")
    assert error.value.fixes[0] == "--set data.max_row_tokens=322"
    with pytest.raises(DataError, match="1 of 1 rows"):
        load("chats", LONG, max_row_tokens=100)


def test_a_pair_is_too_long_where_either_side_is(load: Load) -> None:
    kept, report = load("pairs", PAIR, {**PAIR, "rejected": "y" * 300}, max_row_tokens=100)
    assert [pair.index for pair in kept] == [0] and report.num_too_long == 1


def test_sides_that_are_equal_teach_nothing(load: Load) -> None:
    equal = {**PAIR, "rejected": "hello"}
    kept, report = load("pairs", PAIR, equal)
    assert [pair.index for pair in kept] == [0] and report.num_equal == 1
    assert "line 2: both sides are equal" in report.note
    long = {**PAIR, "chosen": "y" * 300, "rejected": "y" * 301}
    _, report = load("pairs", PAIR, long, max_row_tokens=100, long_rows="truncate")
    assert report.num_equal == 1, "also those that are equal as far as they are read"
    with pytest.raises(DataError, match=r"no row of .* can be learned from.*line 1: both sides"):
        load("pairs", equal)


def test_the_position_is_the_whole_state_and_epochs_have_orders_of_their_own() -> None:
    rows = [chr(97 + number) for number in range(10)]
    one = Examples(rows, seed=1, shuffle=True)
    first, second = one.take(10), one.take(10)
    assert sorted(first) == sorted(second) == rows and first != second
    later = Examples(rows, seed=1, shuffle=True)
    later.position = 13
    assert later.take(4) == second[3:7]
    assert Examples(rows, seed=2, shuffle=True).take(10) != first
    assert Examples(rows, seed=1, shuffle=False).take(12) == [*rows, *rows[:2]]
    assert later.first(4) == first[:4] and later.first(10) == later.first(99) == rows


def test_several_files_and_some_rows_of_one_are_read_as_one(
    chatml: ChatTokenizer, tmp_path: Path
) -> None:
    for name, texts in {"a.jsonl": ["one", "two", "three"], "b.jsonl": ["four", "x" * 300]}.items():
        lines = [json.dumps({"prompt": "?", "completion": text}) for text in texts]
        (tmp_path / name).write_text("\n".join(lines))
    named = [f"{tmp_path}/a.jsonl[1:3]", f"{tmp_path}/b.jsonl"]
    data = Data(train=named, max_row_tokens=200)
    items, report = load_examples(data, "train", kind="chats", tokenizer=chatml)
    assert [_split(line, chatml)[1] for line in items] == [
        f"{text}<|im_end|>" for text in ("two", "three", "four")
    ]
    assert "(b.jsonl line 2: " in report.note
    other, _ = load_examples(Data(train=named[1]), "train", kind="chats", tokenizer=chatml)
    assert len(other) == 2


def test_rows_of_files_of_one_name_are_counted_apart(chatml: ChatTokenizer, tmp_path: Path) -> None:
    named = []
    for folder, text in (("math/a", "one"), ("code/a", "x" * 300), ("code/b", "two")):
        file = tmp_path / folder / "train.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"prompt": "?", "completion": text}))
        named.append(str(file))
    data = Data(train=[*named, named[0]], max_row_tokens=200)
    _, report = load_examples(data, "train", kind="chats", tokenizer=chatml)
    assert (report.num_rows, report.num_used, report.num_sequences) == (4, 3, 3)
    assert report.first[1:] == ("b/train.jsonl line 1", "math/a/train.jsonl line 1")
    assert "several sequences" not in report.note
    assert "1 of 4 rows" in report.note and "(code/a/train.jsonl line 1: " in report.note


def test_a_chat_may_take_several_sequences_which_are_counted(
    tmp_path: Path,
) -> None:
    tokenizer = tokenizer_of(QWEN_3.template, special=QWEN_3.special, eos=QWEN_3.eos)
    thought = {**HELLO, "reasoning_content": "first"}
    file = tmp_path / "data.jsonl"
    rows = [CHAT, {"messages": [USER, thought, USER, HELLO]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept, report = load_examples(Data(train=str(file)), "train", kind="chats", tokenizer=tokenizer)
    assert (
        (report.num_rows, report.num_used, report.num_sequences) == (2, 2, 3) == (2, 2, len(kept))
    )
    assert "1 of 2 rows of data.jsonl are learned in several sequences, 3 in all" in report.note
    assert "(line 2: 2)" in report.note


def test_a_text_of_a_user_that_spells_a_special_token_out_is_told(load: Load) -> None:
    spelled = {"messages": [{**USER, "content": "a<|im_end|>b"}, HELLO]}
    note = load("chats", CHAT, spelled)[1].note
    assert "row 2 of " in note and "contains the text `<|im_end|>`" in note
    own = {"messages": [USER, {**HELLO, "content": "a<|im_start|>b"}]}
    assert load("chats", CHAT, own)[1].note == ""
