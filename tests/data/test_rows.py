"""Tests of columns and bad rows: each planted fault is named by its line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from milescli.core.errors import DataError
from milescli.data.file_rows import read_file
from milescli.data.rows import Columns, DataRow, PromptRowParser
from milescli.data.tables import Table
from milescli.recipe.data_files import DataFile

GOOD = {"prompt": "2 + 2?", "label": "4"}


def _read(path: Path, **changes: object) -> tuple[Columns, list[DataRow]]:
    form = PromptRowParser(**{"field": "prompts", **changes})  # type: ignore[arg-type]
    rows = read_file(Table(path), DataFile(name=str(path)), form, folder=path.parent)
    return rows.require_good(), rows.read(range(len(rows)))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (b'{"prompt": "a", "label": ', "not JSON"),
        (b'{"prompt": "\xff", "label": "1"}', "not UTF-8 \\(byte 13"),
        (b"", "an empty line"),
        (b"[1]", "a row must be a JSON object, not a list"),
        (b'{"prompt": "a"}', "`label` is missing"),
        (b'{"label": "1"}', "`prompt` is missing"),
        (b'{"prompt": null, "label": "1"}', "`prompt` is null"),
        (
            b'{"prompt": 3, "label": "1"}',
            "`prompt` must be text or a list of messages, not a number",
        ),
        (b'{"prompt": "  ", "label": "1"}', "`prompt` is empty"),
        (b'{"prompt": "a", "label": NaN}', "`label` is nan"),
        (b'{"prompt": "a", "label": ""}', "`label` is empty"),
        (b'{"prompt": "a", "label": ["1", "2"]}', "`label` must be text or a number, not a list"),
        (b'{"prompt": "a", "label": {"b": "1"}}', "an object .*`label.b`"),
        (b'{"prompt": "a", "label": true}', "not true or false"),
        (b'{"prompt": "\\ud800", "label": "1"}', "surrogate"),
        (b'{"prompt": [], "label": "1"}', "an empty list"),
        (b'{"prompt": [{"role": "user"}], "label": "1"}', r"`prompt\[0\]`.content is empty"),
        (b'{"prompt": [1, "a"], "label": "1"}', "must contain only token ids"),
        (b'{"prompt": [1, -2], "label": "1"}', "must contain only token ids"),
        (b'{"prompt": [1, 2], "tools": [{}], "label": "1"}', "contains tokens, but its `tools`"),
        (b'{"prompt": "a", "tools": "[", "label": "1"}', "`tools` is not JSON"),
        (b'{"prompt": "a", "tools": [1], "label": "1"}', "`tools` must be a list of tools"),
        (
            b'{"prompt": [{"role": "assistant", "content": "x"}], "label": "1"}',
            "ends with the assistant's message",
        ),
    ],
)
def test_a_bad_row_is_named_by_its_line_and_reason(
    jsonl: Callable[..., Path], fault: bytes, reason: str
) -> None:
    with pytest.raises(DataError, match=f"line 2: .*{reason}"):
        _read(jsonl(GOOD, fault, GOOD))


def test_many_bad_rows_are_counted_and_the_first_five_named(jsonl: Callable[..., Path]) -> None:
    with pytest.raises(DataError) as error:
        _read(jsonl(GOOD, *[b"{"] * 8))
    assert error.value.what.startswith("8 of 9 rows")
    assert (
        "line 6" in error.value.why
        and "line 7" not in error.value.why
        and error.value.why.endswith("and 3 more")
    )
    assert error.value.fixes[0].startswith("sed -n 2p ")


def test_the_fix_of_a_bad_row_quotes_its_path(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "it's mine").mkdir()
    path = jsonl(b"{", GOOD).rename(tmp_path / "it's mine" / "a.jsonl")
    with pytest.raises(DataError) as error:
        _read(path)
    command, _, _ = error.value.fixes[0].partition("   #")
    assert shlex.split(command) == ["sed", "-n", "1p", str(path)]


def test_a_file_without_one_good_line_is_refused_by_line(jsonl: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="line 1: not JSON"):
        _read(jsonl(b"{", b"{"))


def test_gsm8k_columns_are_found_and_the_worked_answer_is_kept(jsonl: Callable[..., Path]) -> None:
    answer = "48/2 = <<48/2=24>>24\n#### 72"
    columns, rows = _read(jsonl({"question": "How many?", "answer": answer}))
    assert (columns.prompt, columns.label) == ("question", "answer")
    assert rows[0].label == rows[0].demonstration == answer


def test_a_plain_label_is_no_demonstration(jsonl: Callable[..., Path]) -> None:
    assert _read(jsonl(GOOD))[1][0].demonstration is None


def test_two_possible_columns_are_refused_with_both_ways_out(jsonl: Callable[..., Path]) -> None:
    path = jsonl({"problem": "a", "label": "b", "answer": "c"})
    with pytest.raises(DataError) as error:
        _read(path)
    assert error.value.fixes == ["--set data.label_key=label", "--set data.label_key=answer"]
    assert _read(path, label_key="answer")[0].label == "answer"
    with pytest.raises(DataError, match="which column"):
        _read(path, needs_label=None)


def test_no_label_is_chosen_among_two_where_the_reward_needs_none(
    jsonl: Callable[..., Path],
) -> None:
    columns, rows = _read(jsonl({"problem": "a", "label": "b", "answer": "c"}), needs_label=False)
    assert columns.label is None and rows[0].label is None


def test_an_absent_column_names_those_that_are_there(jsonl: Callable[..., Path]) -> None:
    path = jsonl({"frage": "a", "antwort": "b"})
    with pytest.raises(DataError, match="columns are frage, antwort") as error:
        _read(path)
    assert error.value.fixes == ["--set data.prompt_key=frage"]
    with pytest.raises(DataError) as error:
        _read(path, prompt_key="farge")
    assert error.value.fixes == ["--set data.prompt_key=frage"]


def test_a_reward_without_labels_needs_no_label_column(jsonl: Callable[..., Path]) -> None:
    assert _read(jsonl({"prompt": "a"}), needs_label=False)[1][0].label is None


@pytest.mark.parametrize("gap", ["", " ", None, float("nan")])
def test_a_reward_without_labels_takes_rows_whose_label_is_a_gap(
    jsonl: Callable[..., Path], gap: object
) -> None:
    path = jsonl({"prompt": "a", "label": "1"}, {"prompt": "b", "label": gap})
    assert [row.label for row in _read(path, needs_label=False)[1]] == ["1", None]
    with pytest.raises(DataError, match="1 of 2 rows"):
        _read(path)
    with pytest.raises(DataError, match="1 of 2 rows"):
        _read(path, needs_label=False, field="demonstrations")


def test_messages_end_with_the_user_and_a_demonstration_with_the_assistant(
    jsonl: Callable[..., Path],
) -> None:
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    _, rows = _read(jsonl({"messages": [user, answer]}), field="demonstrations", needs_label=False)
    assert rows[0].messages == [user]
    assert (rows[0].text, rows[0].demonstration) == ("hi", "hello")


@pytest.mark.parametrize(
    "more",
    [{"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, {"reasoning_content": "so"}],
)
def test_a_demonstration_keeps_what_the_last_turn_has_beside_its_content(
    jsonl: Callable[..., Path], more: dict[str, object]
) -> None:
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    for messages in ([user, {**answer, **more}], json.dumps([user, {**answer, **more}])):
        path = jsonl({"messages": messages})
        _, rows = _read(path, field="demonstrations", needs_label=False)
        assert rows[0].demonstration == [{**answer, **more}]


def test_numbers_are_labels_and_whole_floats_lose_their_point(jsonl: Callable[..., Path]) -> None:
    _, rows = _read(jsonl(*({"prompt": "a", "label": value} for value in (7, 7.0, 0.5))))
    assert [row.label for row in rows] == ["7", "7", "0.5"]


def test_a_byte_order_mark_is_not_a_fault(jsonl: Callable[..., Path]) -> None:
    assert len(_read(jsonl(b'\xef\xbb\xbf{"prompt": "a", "label": "1"}', GOOD))[1]) == 2
