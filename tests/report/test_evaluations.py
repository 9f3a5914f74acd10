"""Evaluations: a table of a few, rewards by prompt, and what `miles eval` kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.insight.reader import read_history
from milescli.report.evaluations import (
    MAX_SHOWN,
    evaluation_files,
    evaluations_of,
    interval_of,
    read_sets,
    rewards_by_prompt,
    settings_of_evaluation,
)
from tests.report.run_folders import make_planted, write_evaluation


def test_of_many_evaluations_first_and_last_and_some_between_are_shown(tmp_path: Path) -> None:
    folder = make_planted(tmp_path / "one", steps=80, eval_every=2)
    write_evaluation(folder, 80, 0.7, seed=1)
    run = RunDir(folder)
    shown = evaluations_of(run, read_history(run))
    assert len(shown) == MAX_SHOWN and (shown[0].step, shown[-1].step) == (0, 80)
    assert not any(one.interval for one in shown), "no samples, or those of other settings"
    history = read_history(run)
    mean = fmean(rewards_by_prompt(folder / "eval" / "step_80.jsonl").values())
    history.evaluations[-1] = replace(history.evaluations[-1], accuracy=mean)
    last = evaluations_of(run, history)[-1]
    assert last.interval == interval_of(run, history.evaluations[-1])
    write_evaluation(folder, 38, 0.7, seed=1)
    hidden = next(one for one in history.evaluations if one.step == 38)
    assert 38 not in [one.step for one in shown]
    assert interval_of(run, replace(hidden, accuracy=mean)) == last.interval
    assert last.interval.low < mean < last.interval.high
    assert last.interval.value == pytest.approx(mean)


def test_rewards_are_means_by_prompt_whatever_the_order_and_torn_lines(tmp_path: Path) -> None:
    rows = [
        {"index": 0, "prompt": "a", "label": "1", "reward": 1.0},
        {"index": 1, "prompt": "b", "label": "1", "reward": 0.0},
        {"index": 0, "prompt": "a", "label": "1", "reward": 0.0},
        {"index": 2, "prompt": "a", "label": "2", "reward": 1.0},
        {"index": 3, "prompt": "b", "label": "1", "reward": 1.0},
        {"index": 4, "prompt": "c", "label": "1", "reward": "high"},
    ]
    file = tmp_path / "step_1.jsonl"
    lines = [json.dumps(row) for row in rows]
    file.write_text("\n".join([*lines, '{"index": 9, "pro']))
    rewards = rewards_by_prompt(file)
    assert list(rewards.values()) == [0.5, 0.0, 1.0, 1.0]
    file.write_text("\n".join(reversed(lines)))
    again = rewards_by_prompt(file)
    assert sorted(again.values()) == sorted(rewards.values()) and set(again) == set(rewards)
    assert rewards_by_prompt(tmp_path / "nothing") == {}


def test_files_are_found_by_set_and_step_and_results_that_cannot_be_read_are_left_out(
    tmp_path: Path,
) -> None:
    folder = make_planted(tmp_path / "one")
    write_evaluation(folder, 10, 0.5, seed=1)
    (folder / "eval" / "sums").mkdir()
    (folder / "eval" / "sums" / "step_10.jsonl").write_text("")
    result = {
        "set": "sums",
        "step": 10,
        "accuracy": 0.5,
        "num_prompts": 4,
        "estimates": {"avg@1": {"value": 0.5, "low": 0.2, "high": 0.8}},
    }
    (folder / "eval" / "sums" / "step_10.json").write_text(json.dumps(result))
    (folder / "eval" / "sums" / "step_20.json").write_text("{}")
    result["estimates"]["avg@1"]["low"] = [0.2]
    (folder / "eval" / "sums" / "step_30.json").write_text(json.dumps(result))
    run = RunDir(folder)
    assert {name: list(of) for name, of in evaluation_files(run).items()} == {
        "": [10],
        "sums": [10],
    }
    assert [(one.set, one.estimates["avg@1"].high) for one in read_sets(run)] == [("sums", 0.8)]


@pytest.mark.parametrize(
    ("kept", "temperature"),
    [('{"settings": {"eval.temperature": 0.0}}', 0.0), ("[]", 1.0), ('{"settings": []}', 1.0)],
)
def test_the_recipe_says_how_it_was_asked_where_miles_eval_does_not(
    tmp_path: Path, kept: str, temperature: float
) -> None:
    (tmp_path / "step_1.json").write_text(kept)
    asked = settings_of_evaluation(
        tmp_path / "step_1.jsonl", {"eval.temperature": 1.0, "train.steps": 8}
    )
    assert asked["eval.temperature"] == temperature and "train.steps" not in asked
