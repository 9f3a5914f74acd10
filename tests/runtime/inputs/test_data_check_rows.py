"""Rows that are learned from are checked as a run takes them: chats and pairs with what is learned,
bad rows by line, and prompts that are held out."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from milescli.console.output import Output
from milescli.recipe.load import load
from milescli.runtime.inputs.data_check import DataCheck, check_file_alone, check_recipe

QUIET = Output(stderr=io.StringIO())
RECIPE = """\
model: {scratch: {}}
data: {max_row_tokens: 64}
rollout: {reward: gsm8k}
train: {steps: 2}
"""
ASKED = {"role": "user", "content": "1 + 1?"}
TOLD = {"role": "assistant", "content": "2"}
DROPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _write(folder: Path, name: str, *rows: object) -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def _check(folder: Path, *sets: str) -> DataCheck:
    (folder / "my.yaml").write_text(RECIPE)
    loaded = load("my.yaml", sets=sets, environ={}, cwd=folder, home=folder)
    return check_recipe(loaded.recipe, model=None, output=QUIET)


@pytest.mark.parametrize("name", ["quickstart-sft", "quickstart-dpo", "quickstart-reward-model"])
def test_a_shipped_recipe_has_no_problem(name: str, tmp_path: Path) -> None:
    recipe = load(name, environ={}, cwd=tmp_path, home=tmp_path).recipe
    check = check_recipe(recipe, model=None, output=QUIET)
    assert not check.problems
    train = next(part for part in check.parts if part.name == "train")
    assert train.report is not None and train.report.num_used == len(train.examples) == 8192


def test_a_chat_is_shown_with_what_is_learned_of_it(tmp_path: Path) -> None:
    file = _write(tmp_path, "a.jsonl", {"messages": [ASKED, TOLD]}, {"messages": [ASKED, TOLD]})
    check = _check(tmp_path, f"data.train={file}", "train.objective=supervised")
    (part,) = check.parts
    assert not check.problems
    assert (part.files[0].learned, part.files[0].duplicates) == ("messages", [(2, 1)])
    shown = part.rendered[0]
    learned = [text for text, on in zip(shown.tokens, shown.loss_mask, strict=True) if on]
    assert "".join(learned).strip() == "2<|im_end|>"


def test_sequences_are_named_by_the_lines_of_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chat whose template drops the reasoning of earlier turns, each turn is a sequence."""
    template = tmp_path / "thinking.jinja"
    template.write_text(DROPS_REASONING)
    told = {**TOLD, "reasoning_content": "Add."}
    chats = [[ASKED, told], [ASKED, told, ASKED, told], [ASKED, told], [ASKED, told, ASKED, told]]
    rows = [{"messages": chat} for chat in chats]
    file = _write(tmp_path, "a.jsonl", *rows)
    sets = (f"data.train={file}", "train.objective=supervised", f"data.chat_template={template}")
    (part,) = _check(tmp_path, *sets).parts
    shown = [one.place for one in part.rendered]
    assert shown == ["line 1", "line 2", "line 2", "line 3", "line 4"]
    (refused,) = _check(tmp_path, *sets, "data.max_row_tokens=30", "data.long_rows=error").problems
    assert refused.what.startswith("2 of 4 rows of ") and "line 2: " in refused.why
    assert refused.why.count("line 4: ") == 1


def test_both_sides_of_a_pair_are_shown(tmp_path: Path) -> None:
    row = {"prompt": "1 + 1?", "chosen": "2", "rejected": "11"}
    check = _check(
        tmp_path, f"data.train={_write(tmp_path, 'a.jsonl', row)}", "train.objective=preference"
    )
    assert not check.problems
    assert [shown.side for shown in check.parts[0].rendered] == ["chosen", "rejected"]


def test_rows_that_a_run_leaves_out_or_refuses_are_told_by_line(tmp_path: Path) -> None:
    good = {"prompt": "1 + 1?", "chosen": "2", "rejected": "11"}
    long, equal = {**good, "chosen": "2 " * 200}, {**good, "rejected": "2"}
    train = _write(tmp_path, "a.jsonl", good, long, equal)
    held = _write(tmp_path, "b.jsonl", good, {"prompt": "a", "chosen": "b"}, {**good, "chosen": ""})
    check = _check(
        tmp_path,
        *(f"data.train={train}", f"data.validation={held}", "train.objective=preference"),
    )
    part, other = check.parts
    assert part.report is not None and part.report.num_used == 1
    assert "line 2" in part.report.note and "line 3" in part.report.note
    assert [bad.line for bad in other.files[0].bad] == [2, 3]
    (problem,) = check.problems
    assert "line 2: `rejected` is missing; line 3: `chosen` is empty" in problem.why


def test_a_held_out_prompt_that_is_learned_from_is_a_problem(tmp_path: Path) -> None:
    train = _write(tmp_path, "a.jsonl", {"messages": [ASKED, TOLD]})
    heldout = _write(tmp_path, "b.jsonl", {"prompt": "1 + 1?", "label": "2"})
    check = _check(
        tmp_path, f"data.train={train}", f"data.eval={heldout}", "train.objective=supervised"
    )
    (problem,) = check.problems
    assert "1 held-out prompts are also in the training rows" in problem.what


@pytest.mark.parametrize(
    ("row", "learned"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "chosen, rejected"),
        ({"messages": [ASKED, TOLD]}, "messages"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "conversations",
        ),
        ({"messages": [ASKED], "label": "2"}, None),
        ({"prompt": "a", "label": "b"}, None),
    ],
)
def test_a_file_alone_is_taken_for_what_its_first_row_is(
    row: dict[str, object], learned: str | None, tmp_path: Path
) -> None:
    check = check_file_alone(
        str(_write(tmp_path, "a.jsonl", row)),
        prompt_key=None,
        label_key=None,
        model=None,
        output=QUIET,
    )
    assert not check.problems
    assert check.parts[0].files[0].learned == learned
