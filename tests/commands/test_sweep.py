"""`miles sweep`: the table of its dry run, what it refuses, and the report of a sweep that has not
begun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.conftest import Miles

LR = "search: {train.optimizer.lr: {loguniform: [1e-5, 1e-2]}}"


def write(text: str) -> str:
    """The name of a sweep file in this folder."""
    Path("mine.yaml").write_text(text)
    return "mine.yaml"


def test_a_dry_run_shows_every_trial_with_memory_hours_and_cost(miles: Miles) -> None:
    file = write(f"recipe: qwen2.5-7b\ntrials: 3\n{LR}\n")
    on = ("--on", "8xH100", "--price-per-gpu-hour", "2")
    told = miles("sweep", file, "--dry-run", *on, "--json").result
    assert [one["trial"] for one in told["trials"]] == [1, 2, 3]
    for one in told["trials"]:
        assert one["fits"] and one["memory_bytes"] > 2**30
        assert one["cost"] == pytest.approx(2 * one["gpu_hours"], abs=0.01)
    assert miles("sweep", file, "--dry-run", *on, "--json").result == told
    said = miles("sweep", file, "--dry-run", *on)
    assert "mine-3" in said.out and "nothing was started" in said.err
    assert not Path("runs").exists()


def test_trials_that_cannot_run_are_shown_with_the_planner_s_error(miles: Miles) -> None:
    models = "search: {model.path: {grid: [Qwen/Qwen3-0.6B, Qwen/Qwen3-235B-A22B]}}"
    file = write(f"recipe: qwen3-0.6b\nsearcher: grid\n{models}\n")
    told = miles("sweep", file, "--dry-run", "--on", "1xH100", "--json").result
    small, large = told["trials"]
    assert small["fits"] and not large["fits"]
    assert "does not fit" in large["error"]["error"] and large["error"]["exit_code"] == 5


@pytest.mark.parametrize(
    ("text", "code", "what"),
    [
        (f"recipe: quickstart\ntrails: 3\n{LR}", 3, "`trails`"),
        (f"recipe: quickstrat\n{LR}", 3, "quickstrat"),
        (f"recipe: quickstart\nset: {{data.eval: null, eval.every: 0}}\n{LR}", 3, "held-out"),
        (f"recipe: quickstart\nscheduler: asha\nset: {{eval.every: 0}}\n{LR}", 3, "to compare"),
        (f"recipe: quickstart\nscheduler: asha\nrung_steps: 30\n{LR}", 3, "never act"),
        (f"recipe: quickstart-sft\nscheduler: asha\nset: {{train.epochs: 2}}\n{LR}", 3,
         "needs the number of steps"),
        ("recipe: quickstart\nscheduler: pbt\nsearch: {train.optimizer.beta1: "
         "{uniform: [0.8, 0.9]}}", 3, "`train.optimizer.beta1`"),
        ("recipe: quickstart\nsearch: {train.algorithm: {choice: [grqo]}}", 3, "`grqo`"),
    ],
)  # fmt: skip
def test_what_is_refused_before_a_folder_is_made(
    miles: Miles, text: str, code: int, what: str
) -> None:
    said = miles("sweep", write(f"{text}\n"), "--json")
    assert said.code == code and said.out == ""
    told = json.loads(said.err.splitlines()[-1])
    assert what in told["error"] and told["why"] and told["fix"]
    assert not Path("runs").exists()


def test_options_of_runs_are_refused_where_a_sweep_is_continued(miles: Miles) -> None:
    folder = Path("runs/mine")
    folder.mkdir(parents=True)
    for name in ("trials.jsonl", "sweep.yaml"):
        (folder / name).write_text("")
    said = miles("resume", "mine", "--steps", "3")
    assert said.code == 2 and "sweep.yaml" in said.err
    (folder / "sweep.yaml").write_text(f"recipe: quickstart\n{LR}\n")
    said = miles("report", "mine")
    assert said.code == 6 and "place.json" in said.err
    said = miles("status", "mine")
    assert said.code == 6 and "miles report mine" in said.err
    said = miles("stop", "mine")
    assert said.code == 0 and "was not running" in said.err
