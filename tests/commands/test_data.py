"""`miles data check`: what it shows of files and recipes, and how it ends."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import milescli.rollout.rewards.math.reward  # noqa: F401 - which needs a real stderr while it is imported
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from tests.commands.conftest import Miles


def _lines(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def _row(prompt: str, label: str = "1") -> dict[str, str]:
    return {"prompt": prompt, "label": label}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_shows_its_columns_repeated_prompts_and_lengths(miles: Miles, folder: Path) -> None:
    (folder / "a.jsonl").write_text(_lines(_row("a"), _row("bcd"), _row("a", "2")))
    said = miles("data", "check", "a.jsonl")
    assert said.code == 0 and "a run would accept it" in said.err
    assert "prompt, label" in said.out and "line 3: the prompt repeats that of line 1" in said.out
    payload = miles("data", "check", "a.jsonl", "--json").result
    (part,) = payload["parts"]
    (file,) = part["files"]
    assert (payload["usable"], file["num_rows"], file["num_duplicates"]) == (True, 3, 1)
    assert file["duplicates"] == [{"line": 3, "first_line": 1}]
    assert part["length_unit"] == "characters"
    assert sum(item["rows"] for item in part["lengths"]) == 3


def test_bad_rows_are_told_by_line_and_the_end_is_that_of_bad_data(
    miles: Miles, folder: Path
) -> None:
    (folder / "a.jsonl").write_text(_lines(_row("a"), "{", _row("b"), "[]", _row("")))
    said = miles("data", "check", "a.jsonl")
    assert said.code == 3 and said.err.startswith("error: 3 of 5 rows of ")
    assert "line 2: not JSON" in said.out and "line 5: `prompt` is empty" in said.out
    said = miles("data", "check", "a.jsonl", "--json")
    payload = said.result
    assert said.code == 3 and not payload["usable"]
    assert [row["line"] for row in payload["parts"][0]["files"][0]["bad"]] == [2, 4, 5]
    assert json.loads(said.err.splitlines()[-1])["type"] == "DataError"


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["nothing.jsonl"], 3, "there is no file"),
        (["odd.jsonl"], 3, "no prompt column"),
        (["odd.jsonl", "--prompt-key", "frage"], 0, "a run would accept it"),
        (["odd.jsonl", "--set", "data.prompt_key=frage"], 0, "a run would accept it"),
        (["odd.jsonl", "--set", "train.steps=1"], 2, "only keys of `data`"),
        (["odd.jsonl", "--set", "data.eval=odd.jsonl"], 2, "only keys of `data`"),
        (["odd.jsonl", "--set", "data.dedup=foo"], 3, "`data.dedup` cannot be `foo`"),
        (["odd.jsonl", "--set", "data.max_prompt_tokens=abc"], 3, "cannot be `abc`"),
        (["odd.jsonl[5:9]"], 3, "odd.jsonl has no rows [5:9]"),
        (["odd.jsonl", "--model", "none"], 3, "miles data check odd.jsonl --model FOLDER"),
        (["quickstart", "--model", "none"], 3, "fix: --model FOLDER"),
        (["quickstart", "--prompt-key", "frage"], 2, "--set data.prompt_key"),
        (["nothing.yaml"], 3, "no file is there"),
        (["quickstart", "--set", "data.prompts=nothing.jsonl"], 3, "there is no file"),
        ([], 2, "FILE|RECIPE"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(
    miles: Miles, folder: Path, argv: list[str], code: int, says: str
) -> None:
    (folder / "odd.jsonl").write_text('{"frage": "a"}\n')
    said = miles("data", "check", *argv)
    assert said.code == code and says in said.err


def test_the_fix_of_a_file_is_a_command_that_mends_it(miles: Miles, folder: Path) -> None:
    (folder / "odd.jsonl").write_text('{"frage": "a"}\n')
    said = miles("data", "check", "odd.jsonl", "--json")
    (fix,) = json.loads(said.err.splitlines()[-1])["fix"]
    assert fix == "miles data check odd.jsonl --prompt-key frage"
    assert miles(*fix.split()[1:]).code == 0


@pytest.mark.parametrize(
    ("row", "argv"),
    [
        ({"my prompt": "a"}, []),
        ({"prompt": "a", "answer": "4", "target": "5"}, []),
        ({"frage": "a", "antwort": "4", "target": "5", "label": "6"}, []),
        ({"prompt": "a", "label": "4", "audio": ["a.wav"], "my notes": "", "videos": ["b"]}, []),
        ({"prompt": "a", "reward_model": {"truth": "4"}}, ["--label-key", "reward_model"]),
        ({"prompt": "a", "completion": "b", "response": "c"}, []),
        ({"prompt": "a", "label": "b", "context": "c"}, ["--set", "data.system_prompt=be brief"]),
    ],
)
def test_the_fixes_of_a_file_lead_to_one_that_a_run_would_take(
    miles: Miles, folder: Path, row: dict[str, object], argv: list[str]
) -> None:
    (folder / "a b.jsonl").write_text(_lines(row))
    said = miles("data", "check", "a b.jsonl", *argv, "--json")
    assert said.code == 3
    for _ in range(4):
        fix = json.loads(said.err.splitlines()[-1])["fix"][0]
        words = shlex.split(fix, comments=True)
        assert words[:4] == ["miles", "data", "check", "a b.jsonl"]
        assert not argv or argv[0] == "--label-key" or argv[1] in words
        said = miles(*words[1:], "--json")
        if said.code == 0:
            return
    pytest.fail(said.err)


def test_the_layout_is_named_with_what_each_column_is(miles: Miles, folder: Path) -> None:
    row = {"instruction": "Add", "input": "2+2", "output": "4", "system": "Brief.", "id": 1}
    (folder / "a.jsonl").write_text(_lines(row))
    (file,) = miles("data", "check", "a.jsonl", "--json").result["parts"][0]["files"]
    assert file["layout"] == "Alpaca" and file["learned"] == "output"
    assert file["reads"] == {
        "instruction": "prompt",
        "input": "context",
        "system": "system turn",
        "output": "response",
    }
    said = miles("data", "check", "a.jsonl").out
    assert "Alpaca" in said and "input (context), system (system turn)" in said
    assert "not read" in said and "id" in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("prompt,label\na,NA\nb,None\n", "read as text: NA, None"),
        ("prompt;label\na;4\n", "a run would accept it"),
    ],
)
def test_words_for_a_gap_in_csv_are_told(
    miles: Miles, folder: Path, content: str, says: str
) -> None:
    (folder / "a.csv").write_text(content)
    said = miles("data", "check", "a.csv")
    assert said.code == 0 and says in said.err


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("tran.jsonl", "miles data check {}/train.jsonl"),
        ("train.csv", "miles data check {}/train.jsonl"),
        ("nosuch.jsonl", "ls {}"),
        ("there/train.jsonl", "ls {}"),
    ],
)
def test_a_missing_file_suggests_no_file_but_one_of_nearly_its_name(
    miles: Miles, folder: Path, name: str, fix: str
) -> None:
    for other in ("train.jsonl", "hs.jsonl", "such.txt", "no.jsonl", "much.jsonl"):
        (folder / other).write_text("")
    said = miles("data", "check", name, "--json")
    assert json.loads(said.err.splitlines()[-1])["fix"] == [fix.format(folder)]


def test_pairs_whose_sides_are_all_equal_are_refused_as_by_a_run(
    miles: Miles, folder: Path
) -> None:
    (folder / "a.jsonl").write_text(_lines({"prompt": "a", "chosen": "b", "rejected": "b"}))
    said = miles("data", "check", "a.jsonl")
    assert said.code == 3 and "can be learned from" in said.err


def test_a_model_folder_gives_tokens_and_the_prompts_as_it_sees_them(
    miles: Miles, folder: Path
) -> None:
    make_scratch_tokenizer(["What is 2 + 2?"] * 9, 300, folder / "model")
    pq.write_table(pa.Table.from_pylist([_row("What is 2 + 2?"), _row("é?")]), folder / "a.parquet")
    said = miles("data", "check", "a.parquet", "--model", "model")
    assert said.code == 0 and "<|im_start|>user\nWhat is 2 + 2?<|im_end|>" in said.out
    payload = miles("data", "check", "a.parquet", "--model", "model", "--json").result
    (part,) = payload["parts"]
    for shown, text in zip(part["rendered"], ("What is 2 + 2?", "é?"), strict=True):
        assert f"user\n{text}<|im_end|>" in "".join(shown["tokens"])
        assert len(shown["tokens"]) == len(shown["loss_mask"]) and not any(shown["loss_mask"])
    assert part["length_unit"] == "tokens" and part["report"]["num_rows"] == 2


def test_a_mix_is_shown_source_by_source_and_a_demonstration_with_its_loss(
    miles: Miles, folder: Path
) -> None:
    (folder / "my.yaml").write_text(
        "model: {scratch: {}}\n"
        "data:\n"
        "  mix:\n"
        "    - {path: a.jsonl, weight: 2, name: sums}\n"
        '    - {path: "b.csv[0:1]"}\n'
        "  demonstrations: a.jsonl\n"
    )
    (folder / "a.jsonl").write_text(_lines({**_row("a?"), "demonstration": "so it is 1"}))
    (folder / "b.csv").write_text("prompt,label\nb?,2\n,\n")
    said = miles("data", "check", "my.yaml")
    assert said.code == 0, said.err
    assert "sums: a.jsonl" in said.out and "b.csv[0:1]: b.csv[0:1]" in said.out
    assert "«so it is 1<|im_end|>»" in said.out
    parts = miles("data", "check", "my.yaml", "--json").result["parts"]
    assert [part["name"] for part in parts] == ["sums", "b.csv[0:1]", "demonstrations"]
    (shown,) = parts[2]["rendered"]
    learned = [t for t, m in zip(shown["tokens"], shown["loss_mask"], strict=True) if m]
    assert "".join(learned) == "so it is 1<|im_end|>"


def test_the_group_alone_shows_its_page(miles: Miles) -> None:
    said = miles("data")
    assert said.code == 0 and "miles data check FILE" in said.out
