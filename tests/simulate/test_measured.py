"""A run's seconds and lengths are found again from its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli import models
from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import DataError
from milescli.recipe.load import load
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.simulate.lengths import LogNormal, Recorded
from milescli.simulate.measured import read_measured
from tests.simulate import runs


@pytest.fixture
def facts(tmp_path: Path):  # type: ignore[no-untyped-def]
    return planned_facts(load("quickstart", environ={}, cwd=tmp_path, home=tmp_path).recipe)


def test_seconds_and_lengths_of_a_run_are_found(tmp_path: Path, facts) -> None:  # type: ignore[no-untyped-def]
    runs.write_run(tmp_path / "one", facts)
    found = read_measured(RunDir(tmp_path / "one"))
    assert found.train_token_s == pytest.approx(runs.TRAIN_TOKEN_S)
    assert found.publish_s == pytest.approx(runs.PUBLISH_S)
    assert found.prompt_tokens == runs.PROMPT and found.kept_share == 1.0
    step_s = found.step_s + found.request_s * found.running
    truth = runs.STEP_S + runs.REQUEST_S * found.running
    assert step_s == pytest.approx(truth, rel=0.1), "of a decode step as it was on average"
    assert isinstance(found.lengths, Recorded) and len(found.lengths.groups) == 18 * runs.GROUPS
    assert found.is_of(models.table(facts))


def test_without_kept_samples_lengths_have_the_mean_of_the_metrics(tmp_path: Path, facts) -> None:  # type: ignore[no-untyped-def]
    runs.write_run(tmp_path / "one", facts)
    runs.write_run(tmp_path / "two", facts, keeps=False)
    kept, metrics = (read_measured(RunDir(tmp_path / name)).lengths for name in ("one", "two"))
    assert isinstance(metrics, LogNormal) and metrics.mean == pytest.approx(kept.mean)


def test_a_run_with_few_steps_is_refused(tmp_path: Path, facts) -> None:  # type: ignore[no-untyped-def]
    runs.write_run(tmp_path / "one", facts)
    events = RunDir(tmp_path / "one").events_file
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(DataError, match="how fast") as refused:
        read_measured(RunDir(tmp_path / "one"))
    assert "6 steps that sample are needed, and it has 5" in refused.value.why


def test_a_run_of_another_version_is_refused(tmp_path: Path, facts) -> None:  # type: ignore[no-untyped-def]
    runs.write_run(tmp_path / "one", facts)
    RunDir(tmp_path / "one").plan_file.write_text('{"trainer": {"future": 1}}')
    with pytest.raises(DataError, match="how fast") as refused:
        read_measured(RunDir(tmp_path / "one"))
    assert "plan.json" in refused.value.why
