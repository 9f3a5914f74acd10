"""The benchmarks themselves, in small: both sides start, work in turns and end."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sums
from own_run import load_recipe
from rl import read_events, run_trl, timed
from sides import ROOT, SideDied
from stages import STAGES


def measured(tmp_path: Path, *words: str) -> dict[str, Any]:
    """What `python bench/WORDS` writes for machines."""
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, *words, "--pairs", "1", "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.trainer
@pytest.mark.slow
def test_trainer_and_plain_pytorch_do_the_same_work(tmp_path: Path) -> None:
    """The benchmark fails where their gradient norms differ."""
    words = ("--lengths", "ragged", "--sequences", "8", "--peer-batch", "4")
    record = measured(tmp_path, "bench/train.py", *words)
    (row,) = record["rows"]
    assert row["pairs"] == 1 and row["ratio"] > 0
    assert any("gradient norms differ by" in note for note in record["notes"])


@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.slow
def test_engines_of_a_plan_and_transformers_sample_in_turns(tmp_path: Path) -> None:
    record = measured(tmp_path, "bench/rollout.py", "--shape", "tiny")
    (row,) = record["rows"]
    assert row["pairs"] == 1 and row["ratio"] > 0
    assert any(note.startswith("tiny: miles engines x threads") for note in record["notes"])


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is installed by `make bench` alone")
@pytest.mark.slow
def test_trl_takes_the_recipe_of_the_task(tmp_path: Path) -> None:
    sums.write(tmp_path)
    (tmp_path / "fresh").rename(tmp_path / "model")
    figures = run_trl(tmp_path, "0", num_steps=1)
    assert 0 < figures["step_s"] < figures["first_step_s"] < figures["total_s"]
    events = read_events(tmp_path / "trl/0/events.jsonl")
    assert [event["event"] for event in events] == ["eval", "step", "eval", "log"]
    assert (tmp_path / "trl/0/model/config.json").exists()


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is installed by `make bench` alone")
@pytest.mark.trainer
@pytest.mark.slow
@pytest.mark.parametrize("stage", sorted(STAGES))
def test_trl_loses_what_miles_does_in_each_of_five_steps(tmp_path: Path, stage: str) -> None:
    """The benchmark fails where their losses differ by more than 1e-5."""
    words = ("--stage", stage, "--lengths", "ragged", "--rows", "8")
    record = measured(tmp_path, "bench/stages.py", *words)
    (row,) = record["rows"]
    assert row["pairs"] == 1 and row["ratio"] > 0
    assert any("losses of 5 steps differ by" in note for note in record["notes"])


def test_the_task_is_a_recipe_and_holds_out_what_it_asks(tmp_path: Path) -> None:
    sums.write(tmp_path)
    recipe = load_recipe(sums.recipe(tmp_path, eval_every=10), tmp_path).recipe
    assert recipe.eval.num_prompts == sums.NUM_HELDOUT
    assert recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt == 128
    rows = {
        name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("train.jsonl", "heldout.jsonl")
    }
    assert len(rows["heldout.jsonl"]) == sums.NUM_HELDOUT
    prompts = {name: {row["prompt"] for row in lines} for name, lines in rows.items()}
    assert prompts["train.jsonl"].isdisjoint(prompts["heldout.jsonl"])


def test_a_command_is_timed_until_its_event_and_its_failure_is_told(tmp_path: Path) -> None:
    events, log = tmp_path / "events.jsonl", tmp_path / "log"
    program = (
        "import sys, time; f = open(sys.argv[1], 'w', buffering=1); f.write('{\"event\": 1}\\n'); "
        'time.sleep(0.3); f.write(\'{"event": 2}\\n{"ev\'); time.sleep(0.3)'
    )
    done = timed(
        [sys.executable, "-c", program, str(events)],
        log=log,
        events=events,
        wanted=lambda event: event["event"] == 2,
    )
    assert done.first_s is not None and done.first_s > 0
    assert [event["event"] for event in read_events(events)] == [1, 2], "no half line"
    with pytest.raises(SideDied, match="ended with 3"):
        timed([sys.executable, "-c", "raise SystemExit(3)"], log=log)
