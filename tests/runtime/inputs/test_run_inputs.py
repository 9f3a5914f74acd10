"""Tests of what a run takes in: bad input is refused before any process starts."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image as Pillow

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import DataError
from milescli.recipe.load import load
from milescli.runtime.inputs.input_check_process import check_inputs
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.runtime.inputs.run_inputs import RunInputs, prepare_inputs

TINY = """\
model:
  scratch: {hidden_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 16,
            ffn_hidden_size: 128}
"""


def _prepare(folder: Path, *, reward: str, prompts: list[str], heldout: list[str]) -> None:
    """Labels of the training prompts and of the held-out ones."""
    for name, labels in (("train", prompts), ("test", heldout)):
        rows = [
            json.dumps({"prompt": f"{name} {row}", "label": label})
            for row, label in enumerate(labels)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    (folder / "my.yaml").write_text(TINY)
    sets = [
        f"data.prompts={folder}/train.jsonl",
        f"data.eval={folder}/test.jsonl",
        f"rollout.reward={reward}",
    ]
    loaded = load("my.yaml", sets=sets, environ={}, cwd=folder, home=folder)
    prepare_inputs(loaded.recipe, RunDir(path=folder / "run"))


@pytest.mark.parametrize("reward", ["math", "gsm8k"])
def test_a_label_that_the_reward_cannot_grade_is_refused_with_file_and_line(
    tmp_path: Path, reward: str
) -> None:
    with pytest.raises(DataError, match=r"1 of 3 prompts of .*train\.jsonl .*line 2: the label"):
        _prepare(tmp_path, reward=reward, prompts=["1", "so #### ", "3"], heldout=["4"])


def test_labels_of_held_out_prompts_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 of 2 prompts of .*test\.jsonl .*line 1: the label"):
        _prepare(tmp_path, reward="gsm8k", prompts=["1"], heldout=["four", "5"])


def test_what_can_be_graded_is_taken_in(tmp_path: Path) -> None:
    _prepare(tmp_path, reward="math", prompts=["1", r"\$36"], heldout=["x + 1"])


MIX = """\
data:
  eval: test.jsonl
  mix:
    - {{path: {folder}/a.jsonl, quota: 1}}
    - {{path: {folder}/b.csv, quota: 1, reward: exact_match}}
"""


def _mixed(folder: Path, output: Output | None = None, **files: str) -> RunInputs:
    for name in ("a.jsonl", "b.csv", "test.jsonl"):
        (folder / name).write_text(files[name.partition(".")[0]])
    (folder / "my.yaml").write_text(TINY + MIX.format(folder=folder))
    sets = [f"data.eval={folder}/test.jsonl"]
    loaded = load("my.yaml", sets=sets, environ={}, cwd=folder, home=folder)
    return prepare_inputs(loaded.recipe, RunDir(path=folder / "run"), output=output)


def test_each_source_of_a_mix_is_checked_by_its_own_reward(tmp_path: Path) -> None:
    files = {"test": '{"prompt": "c?", "label": "3"}'}
    good = {"a": '{"prompt": "a?", "label": "1"}', "b": "prompt,label\nb?,so #### it\n"}
    taken = _mixed(tmp_path, **files, **good).prompts.take(2)
    assert {prompt.source for _, prompt in taken} == {f"{tmp_path}/a.jsonl", f"{tmp_path}/b.csv"}
    with pytest.raises(DataError, match=r"a\.jsonl .*line 1: the label"):
        _mixed(tmp_path, **files, a='{"prompt": "a?", "label": "so #### "}', b=good["b"])
    with pytest.raises(DataError, match=r"row 1 of .*test\.jsonl is row 2 of .*b\.csv"):
        _mixed(tmp_path, **good, test='{"prompt": "b?", "label": "3"}')


def test_a_held_out_prompt_that_is_nearly_trained_on_is_a_warning(tmp_path: Path) -> None:
    story = "If a train leaves at 7 and goes 60 miles an hour, when has it gone 120 miles?"
    said = io.StringIO()
    _mixed(
        tmp_path,
        Output(stderr=said),
        a=json.dumps({"prompt": "?", "label": "1"})
        + "\n"
        + json.dumps({"prompt": story.upper(), "label": "9"}),
        b="prompt,label\nb?,2\n",
        test=json.dumps({"prompt": story, "label": "9"}),
    )
    assert "1 held-out prompts are near duplicates of training prompts: row 1 of" in said.getvalue()
    assert "test.jsonl and row 2 of" in said.getvalue()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "2"}]},
        {"prompt": "two", "chosen": "2", "rejected": "3"},
    ],
)
def test_a_held_out_prompt_that_rows_teach_is_refused(tmp_path: Path, row: dict) -> None:
    other = json.loads(json.dumps(row).replace("two", "four"))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [other, row])))
    (tmp_path / "test.jsonl").write_text(json.dumps({"prompt": "two", "label": "2"}))
    (tmp_path / "my.yaml").write_text(TINY)
    objective = "preference" if "chosen" in row else "supervised"
    sets = [
        f"data.train={tmp_path}/rows.jsonl",
        f"data.eval={tmp_path}/test.jsonl",
        f"train.objective={objective}",
        "train.batch_size=1",
    ]
    loaded = load("my.yaml", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises(DataError, match=r"1 held-out prompts .* usable row 2 of"):
        prepare_inputs(loaded.recipe, RunDir(path=tmp_path / "run"))


@pytest.mark.parametrize("short", ["train", "validation"])
def test_kto_needs_two_rows_of_each_file(tmp_path: Path, short: str) -> None:
    rows = [{"prompt": text, "completion": text, "label": True} for text in ("one", "two", "three")]
    lines = [json.dumps(row) for row in rows]
    for name, mine in {"train": lines, "validation": lines[::-1]}.items():
        kept = mine[:1] if name == short else mine
        (tmp_path / f"{name}.jsonl").write_text("\n".join(kept))
    (tmp_path / "my.yaml").write_text(TINY)
    sets = [
        *(f"data.{name}={tmp_path}/{name}.jsonl" for name in ("train", "validation")),
        "train.objective=preference",
        "train.preference.loss=kto",
    ]
    loaded = load("my.yaml", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises(DataError, match=f"needs several rows in `data.{short}`"):
        prepare_inputs(loaded.recipe, RunDir(path=tmp_path / "run"))


@pytest.mark.parametrize(("family", "is_shown"), [("qwen2_5_vl", True), ("qwen3", False)])
def test_rows_with_images_of_tools_are_taken_in_before_there_is_a_tokenizer(
    family: str, is_shown: bool, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    Pillow.new("RGB", (28, 28)).save(buffer, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    result = {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    answer = {"role": "assistant", "content": "black"}
    asked = {"role": "user", "content": "Which colour?"}
    row = {"messages": [asked, {**answer, "content": "", "tool_calls": [call]}, result, answer]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "my.yaml").write_text(
        f"model: {{scratch: {{family: {family}}}}}\ntrain: {{objective: supervised, steps: 1}}\n"
    )
    sets = [f"data.train={tmp_path}/rows.jsonl"]
    recipe = load("my.yaml", sets=sets, environ={}, cwd=tmp_path, home=tmp_path).recipe
    (rows,) = [each for each in check_inputs(recipe, planned_facts(recipe)) if each.name == "rows"]
    assert (rows.refusal is None) is is_shown, rows.refusal
