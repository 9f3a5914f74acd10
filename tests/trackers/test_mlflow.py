"""MLflow's own store in a folder, read by its client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")

from mlflow.tracking import MlflowClient

from milescli.trackers.mlflow import ID_TAG, VARIABLE, MLflow
from tests.trackers.running import RECIPE, events, run_in, tell


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = f"file://{tmp_path}/mlruns"
    monkeypatch.setenv(VARIABLE, uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return uri


def test_a_run_may_have_a_quote_in_its_name(store: str, tmp_path: Path) -> None:
    run = replace(run_in(tmp_path), id="it's-4f2a90c1")
    for outcome in ("stopped", "done"):
        tell(MLflow(run=run), events(1), outcome=outcome)
    client = MlflowClient(store)
    [made] = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert made.info.status == "FINISHED"


def test_a_run_that_is_resumed_goes_on_in_the_same_run(store: str, tmp_path: Path) -> None:
    tell(MLflow(run=run_in(tmp_path)), events(1, 2), outcome="stopped")
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("sums")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED" and run.info.run_name == "sums-1"
    assert run.data.tags[ID_TAG] == "sums-1-4f2a90c1"
    assert set(run.data.params) == set(RECIPE)
    assert run.data.params["rollout.reward"] == '{"math": 1.0}'

    tell(MLflow(run=run_in(tmp_path, first_step=2)), events(3, 4))
    [again] = client.search_runs([experiment.experiment_id])
    assert again.info.run_id == run.info.run_id and again.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "rollout/reward_mean")
    assert [one.step for one in history] == [1, 2, 3, 4]
    assert history[-1].value == pytest.approx(0.4)
