"""The files of an evaluation: what is written is what is read."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import DataError
from milescli.core.types import Group, Prompt
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tokenizer import load_tokenizer
from milescli.recipe.schema import Recipe
from milescli.runtime.evaluation.results import (
    SetResult,
    compare_results,
    find_result,
    read_result,
    read_results,
    rows_of,
    settings_of,
    sha256_of_prompts,
    write_result,
)
from milescli.runtime.evaluation.sets import EvalOptions, load_set, sets_of
from tests.runtime.evaluation.results import make_result
from tests.samples import make_sample, make_trajectory


def _groups() -> list[Group]:
    sample = make_sample(make_trajectory([1, 2], [3]), reward=1.0, text="#### 3")
    return [
        Group(prompt=Prompt(index=index, token_ids=[1, 2], text="?", label="3"), samples=[sample])
        for index in (0, 4)
    ]


def test_a_result_and_its_samples_come_back_as_they_were_written(tmp_path: Path) -> None:
    result = make_result(step=3)
    rows = rows_of(_groups(), domains={4: "odd"}, answer=lambda text: text[-1])
    write_result(result, rows, folder=tmp_path)
    file = tmp_path / "eval" / "few" / "step_3.json"
    assert read_result(file) == result
    assert json.loads(file.read_text())["fingerprint"] == result.fingerprint
    lines = [json.loads(line) for line in file.with_suffix(".jsonl").open()]
    assert lines == rows == pq.read_table(file.with_suffix(".parquet")).to_pylist()
    assert [line["domain"] for line in lines] == [None, "odd"]
    assert (lines[0]["answer"], lines[0]["is_right"], lines[0]["response_ids"]) == ("3", True, [3])


def test_the_table_has_what_only_later_samples_have_and_any_text(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"response": "cut \ud83d"},
        {"response": "\ud83d\ude00", "reward_parts": {"form": 1.0}},
    ]
    write_result(make_result(step=3), rows, folder=tmp_path)
    table = pq.read_table(tmp_path / "eval" / "few" / "step_3.parquet").to_pylist()
    assert table == [
        {"response": "cut \ufffd", "reward_parts": None},
        {"response": "\U0001f600", "reward_parts": {"form": 1.0}},
    ]


def test_results_of_a_set_come_by_step_and_others_are_left_out(tmp_path: Path) -> None:
    for step in (20, 3):
        write_result(make_result(step=step), rows_of(_groups()), folder=tmp_path)
    (tmp_path / "eval" / "few" / "step_4.json").write_text("{}")
    assert [one.step for one in read_results(tmp_path / "eval", "few")] == [3, 20]
    with pytest.raises(DataError, match=r"step_4\.json is not a result"):
        read_result(tmp_path / "eval" / "few" / "step_4.json")


def test_the_fingerprint_is_of_data_and_settings_alone() -> None:
    one = make_result(step=1, accuracy=0.2)
    assert one.fingerprint == make_result(step=2, accuracy=0.7).fingerprint
    assert one.fingerprint != make_result(data="e" * 64).fingerprint
    assert one.fingerprint != make_result(settings={"eval.temperature": 0.7}).fingerprint


def test_another_judge_gives_another_fingerprint() -> None:
    one, other = (
        settings_of(
            Recipe.model_validate(
                {"rollout": {"reward": "reward_model", "reward_model": {"path": path}}}
            )
        )
        for path in ("runs/kind", "runs/strict")
    )
    assert make_result(settings=one).fingerprint != make_result(settings=other).fingerprint


def test_prompts_are_the_same_where_text_label_and_order_are() -> None:
    prompts = [Prompt(index=at, token_ids=[at], text=f"{at}?", label="1") for at in range(3)]
    tokenised = [Prompt(index=p.index, token_ids=[9], text=p.text, label="1") for p in prompts]
    assert sha256_of_prompts(prompts) == sha256_of_prompts(tokenised)
    assert sha256_of_prompts(prompts) != sha256_of_prompts(prompts[::-1])


def test_each_set_is_compared_with_its_like_and_other_settings_are_told() -> None:
    ours = [make_result(set=name, model="a", rewards=[1.0] * 9) for name in ("x", "y")]
    settings = {"eval.temperature": 0.7}
    theirs = [
        make_result(set=name, model="b", rewards=[0.0] * 9, settings=settings)
        for name in ("y", "x")
    ]
    told = compare_results(ours, theirs)
    assert [(one.set, one.a, one.b) for one in told] == [("x", "a", "b"), ("y", "a", "b")]
    assert told[0].sentence.startswith("a scores higher than b")
    assert told[0].other_settings == ["eval.temperature"]


def test_two_results_are_compared_on_the_prompts_that_both_were_scored_on() -> None:
    whole = make_result(model="a", rewards=[1.0, 1.0, 0.0, 1.0])
    three = make_result(model="b", rewards=[0.0, 1.0, 0.0], unscored=[1])
    assert three.fingerprint == whole.fingerprint
    for ones, others in ((whole, three), (three, whole)):
        (told,) = compare_results([ones], [others])
        difference = told.difference
        better = (2, 1) if ones is whole else (1, 2)
        assert (difference.num_prompts, told.num_left_out) == (3, 1)
        assert (difference.num_a_better, difference.num_b_better) == better
        assert "1 prompt is left out" in told.sentence


def test_the_newest_result_is_taken_or_that_of_a_step(tmp_path: Path) -> None:
    for step in (3, 20):
        write_result(make_result(step=step), [], folder=tmp_path)
    found = [find_result(tmp_path, "few", step=step) for step in (None, 3, 4)]
    assert [one and one.step for one in found] == [20, 3, None]


def _asked(folder: Path, against: SetResult) -> Any:
    make_scratch_tokenizer(["few words"], 300, folder / "model")
    inputs: Any = SimpleNamespace(tokenizer=load_tokenizer(folder / "model"), prompts=None)
    (folder / "few.jsonl").write_text(json.dumps({"prompt": "1?", "label": "1"}))
    (one,) = sets_of(Recipe(), EvalOptions(data=[f"{folder / 'few.jsonl'}"], against=[against]))
    return load_set(one, RunDir(folder), inputs, output=Output(stderr=io.StringIO()))


def test_other_prompts_or_another_reward_are_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match="was evaluated on other prompts") as other:
        _asked(tmp_path, make_result(rewards=[1.0], unscored=[0, 2]))
    assert other.value.fixes[-1] == "--num-prompts 3"
    data = sha256_of_prompts([Prompt(index=0, token_ids=[], text="1?", label="1")])
    with pytest.raises(DataError, match="was scored with another reward") as refused:
        _asked(tmp_path, make_result(data=data, settings={"rollout.reward": "gsm8k"}))
    assert refused.value.fixes == ["--set rollout.reward=gsm8k"]
    assert _asked(tmp_path, make_result(data=data, settings=settings_of(Recipe()))).prompts
    with pytest.raises(DataError, match="was not evaluated on the set `few`"):
        _asked(tmp_path, make_result(set="other"))
