"""What is read of a run's plan and manifest, whole or damaged."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.insight.facts import read_facts
from milescli.insight.reader import read_history
from milescli.insight.summary import summarize
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
