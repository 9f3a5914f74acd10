"""What is read of a run's plan and manifest, whole or damaged."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from milescli.autopsy.why import read_memory
from milescli.checkpoint.run_dir import RunDir
from milescli.insight.facts import read_facts
from milescli.insight.memory import records
from milescli.insight.reader import read_history
from milescli.insight.samples import read_samples
from milescli.insight.summary import summarize
from tests.fake_run import SAMPLE
from tests.plan.test_devices_measured import plan

KEPT = Path(__file__).parents[1] / "web" / "browser" / "kept" / "quickstart-1"
DAMAGED: list[tuple[str, Any]] = [
    ("max_staleness", "abc"),
    ("max_staleness", math.inf),
    ("batch", None),
    ("batch", {"updates_per_step": math.inf, "samples_per_prompt": [1]}),
    ("engines", [1]),
    ("engines", {"num": math.nan}),
    ("trainer", {"tp": "x"}),
    ("forecast", 5),
    ("forecast", {"training": [5]}),
    ("processes", [{"name": "trainer-rank-0"}]),
    ("steps", -1),
]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run as it was written."""
    return RunDir(shutil.copytree(KEPT, tmp_path / "run"))


def _changed(file: Path, key: str, value: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))


def test_a_plan_for_devices_is_read_with_its_forecast(run: RunDir) -> None:
    made = plan()
    run.plan_file.write_text(made.to_json())
    facts = read_facts(run)
    assert made.forecast is not None and facts.plan["forecast"]["training"]
    assert facts.num_trainer_devices == made.trainer.world_size


@pytest.mark.parametrize(("key", "value"), DAMAGED, ids=lambda one: str(one)[:30])
def test_a_plan_with_a_damaged_part_counts_as_none(run: RunDir, key: str, value: object) -> None:
    assert read_facts(run).plan
    _changed(run.plan_file, key, value)
    facts = read_facts(run)
    assert facts.plan == {}
    assert summarize(run, read_history(run), facts).step > 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token_flops", {"matmul": "x"}),
        ("token_flops", [1]),
        ("recipe", {"eval.every": "x", "train.steps": [1], "rollout.max_response_tokens": {}}),
        ("recipe", {"eval.every": math.inf, "train.steps": 10**30}),
        ("recipe", 5),
    ],
    ids=lambda one: str(one)[:30],
)
def test_a_damaged_manifest_is_read_as_far_as_possible(
    run: RunDir, key: str, value: object
) -> None:
    _changed(run.manifest_file, key, value)
    run.plan_file.unlink()
    assert summarize(run, read_history(run), read_facts(run)).step > 0


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("logs/attempt_1/memory.jsonl", "resident_bytes", {"7": []}),
        ("logs/attempt_1/memory.jsonl", "peak_bytes", {"7": "abc"}),
        ("logs/attempt_1/memory.jsonl", "names", [1]),
        ("logs/attempt_1/memory.jsonl", "time", None),
        ("rollouts/step_20.jsonl", "versions", None),
        ("rollouts/step_20.jsonl", "versions", [{}]),
        ("rollouts/step_20.jsonl", "label", 5),
        ("rollouts/step_20.jsonl", "prompt_index", {"a": 1}),
        ("rollouts/step_20.jsonl", "reward", "high"),
        ("rollouts/step_20.jsonl", "response_ids", 1.5),
    ],
    ids=lambda one: str(one)[:40],
)
def test_a_line_with_a_damaged_part_is_left_out(
    run: RunDir, file: str, key: str, value: object
) -> None:
    path = run.path / file
    path.parent.mkdir(exist_ok=True, parents=True)
    sizes = {"time": 1.0, "resident_bytes": {"7": 5}, "peak_bytes": {"7": 6}, "names": {"7": "a"}}
    whole = dict(SAMPLE) if "rollouts" in file else sizes
    path.write_text(f"{json.dumps(whole)}\n{json.dumps({**whole, key: value})}\n")
    if "rollouts" in file:
        assert len(read_samples(run, 20)) == 1
    else:
        assert len(records(path.parent)) == 1 and read_memory(path.parent).peak == {"a": 5}
    assert summarize(run, read_history(run), read_facts(run)).step > 0
