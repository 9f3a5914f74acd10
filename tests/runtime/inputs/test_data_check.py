"""Tests of what `miles data check` finds in the data of a recipe; tests/commands/test_data.py tries
the command."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from milescli.console.output import Output
from milescli.recipe.load import load
from milescli.runtime.inputs.data_check import (
    DataCheck,
    check_file_alone,
    check_recipe,
    histogram,
)

STORY = "If a train leaves at 7 and goes 60 miles an hour, when has it gone 120 miles?"
RECIPE = """\
model: {{scratch: {{}}}}
data: {{prompts: {0}/train.jsonl, eval: {0}/test.jsonl, max_prompt_tokens: 200}}
rollout: {{reward: gsm8k}}
"""


def _row(prompt: str, label: str = "1") -> dict[str, str]:
    return {"prompt": prompt, "label": label}


def _check(
    folder: Path, train: list[dict[str, str]], test: list[dict[str, str]], *, more: str = ""
) -> DataCheck:
    (folder / "my.yaml").write_text(RECIPE.format(folder) + more)
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load("my.yaml", environ={}, cwd=folder, home=folder)
    return check_recipe(loaded.recipe, model=None, output=Output(stderr=io.StringIO()))


def test_all_that_a_run_would_refuse_is_told_at_once(tmp_path: Path) -> None:
    train = [_row("a?"), _row("7" * 300), _row("c?", "none"), _row("d?")]
    check = _check(tmp_path, train, [_row("new?"), _row("d?")])
    assert [part.name for part in check.parts] == ["prompts", "eval"]
    assert check.parts[0].loaded is not None and check.parts[0].loaded.long_rows == [
        f"row 2 of {tmp_path}/train.jsonl"
    ]
    labels, leak = check.problems
    assert "line 3: the label 'none': it holds no number" in labels.why
    assert f"row 2 of {tmp_path}/test.jsonl is row 4 of {tmp_path}/train.jsonl" in leak.why


def test_a_held_out_prompt_that_is_nearly_trained_on_is_a_warning(tmp_path: Path) -> None:
    check = _check(tmp_path, [_row("a?"), _row(STORY.upper())], [_row(STORY)])
    (warning,) = check.warnings
    assert not check.problems
    assert f"row 1 of {tmp_path}/test.jsonl and row 2 of {tmp_path}/train.jsonl" in warning


def test_held_out_prompts_that_are_never_graded_may_have_any_label(tmp_path: Path) -> None:
    first = "eval: {num_prompts: 1}\n"
    test = [_row("b?"), _row("c?", "none")]
    assert not _check(tmp_path, [_row("a?")], test, more=first).problems
    assert _check(tmp_path, [_row("a?")], test).problems


@pytest.mark.parametrize("field", ["label", "demonstration"])
def test_a_hint_of_a_teacher_needs_what_it_names(tmp_path: Path, field: str) -> None:
    teacher = f"{{url: 'http://127.0.0.1:9', hint: 'it is {{{field}}}'}}"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a?"}\n')
    (tmp_path / "my.yaml").write_text(
        f"model: {{scratch: {{}}}}\ndata: {{prompts: {tmp_path}/rows.jsonl}}\nrollout: {{reward: "
        f"none, samples_per_prompt: 1}}\ntrain: {{distill: {{teachers: [{teacher}]}}}}\n"
    )
    loaded = load("my.yaml", environ={}, cwd=tmp_path, home=tmp_path)
    found = check_recipe(loaded.recipe, model=None, output=Output(stderr=io.StringIO()))
    assert any(field in f"{each.what} {each.why}" for each in found.problems)


def test_one_broken_file_does_not_hide_the_others(tmp_path: Path) -> None:
    check = _check(tmp_path, [_row("a?"), _row("")], [_row("b?", "none")])
    assert [problem.what.split(" of ")[0] for problem in check.problems] == ["1", "1"]
    assert check.parts[0].loaded is None and check.parts[1].loaded is not None


def test_prompts_are_shown_by_the_recipes_own_template(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("Q: {{ messages[0].content }} A:")
    (tmp_path / "a.jsonl").write_text(json.dumps(_row("1?")) + "\n")
    recipe = "model: {scratch: {}}\ndata: {prompts: a.jsonl, chat_template: own.jinja}\n"
    (tmp_path / "my.yaml").write_text(recipe + "rollout: {reward: gsm8k}\n")
    sets = [f"data.prompts={tmp_path}/a.jsonl", f"data.chat_template={tmp_path}/own.jinja"]
    loaded = load("my.yaml", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    check = check_recipe(loaded.recipe, model=None, output=Output(stderr=io.StringIO()))
    (shown,) = check.parts[0].rendered
    assert "".join(shown.tokens) == "Q: 1? A:"


def test_of_several_roles_each_conversation_is_shown(tmp_path: Path) -> None:
    worked = [{"role": "assistant", "name": name, "content": "1"} for name in ("one", "other")]
    (tmp_path / "a.jsonl").write_text(json.dumps({**_row("1?"), "demonstration": worked}) + "\n")
    recipe = "model: {scratch: {}}\ndata: {prompts: task:sums}\n"
    roles = "rollout: {reward: gsm8k, agent: multi_agent, roles: {one: {prompt: Go.}, other: {}}}\n"
    (tmp_path / "my.yaml").write_text(recipe + roles)
    sets = [f"data.{name}={tmp_path}/a.jsonl" for name in ("prompts", "demonstrations")]
    loaded = load("my.yaml", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    check = check_recipe(loaded.recipe, model=None, output=Output(stderr=io.StringIO()))
    prompts, demonstrations = (part.rendered for part in check.parts)
    assert [shown.side for shown in prompts] == ["one"]
    assert "".join(prompts[0].tokens).startswith("<|im_start|>system\nGo.")
    assert [shown.side for shown in demonstrations] == ["one", "other"]
    assert "one: 1" in "".join(demonstrations[1].tokens)


def test_a_demonstration_that_cannot_be_learned_is_named_by_its_row(tmp_path: Path) -> None:
    rows = [{**_row(f"{n}?"), "demonstration": "so" + "<|im_end|>" * (n == 7)} for n in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "my.yaml").write_text("model: {scratch: {}}\nrollout: {reward: gsm8k}\n")
    sets = [f"data.{name}={tmp_path}/a.jsonl" for name in ("prompts", "demonstrations")]
    loaded = load("my.yaml", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    check = check_recipe(loaded.recipe, model=None, output=Output(stderr=io.StringIO()))
    (problem,) = check.problems
    assert "cannot be used as demonstrations" in problem.what
    assert problem.why.startswith("line 8: ") and "`<|im_end|>`" in problem.why


def test_a_histogram_counts_each_length_once() -> None:
    lengths = sorted(n * n % 101 for n in range(300))
    ranges = histogram(lengths)
    assert len(ranges) <= 8 and sum(count for _, _, count in ranges) == 300
    for low, high, count in ranges:
        assert count == sum(low <= length <= high for length in lengths)
    assert histogram([3]) == [(3, 3, 1)]


def test_some_rows_of_a_file_are_checked_alone(tmp_path: Path) -> None:
    rows = [{"question": f"{n % 3}?", "answer": "1"} for n in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check = check_file_alone(
        f"{tmp_path}/a.jsonl[1:5]",
        prompt_key=None,
        label_key=None,
        model=None,
        output=Output(stderr=io.StringIO()),
    )
    (look,) = check.parts[0].files
    assert (look.num_rows, look.duplicates, check.problems) == (4, [(5, 2)], [])
