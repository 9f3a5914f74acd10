"""MLflow, at MLFLOW_TRACKING_URI; a user, password or token comes from its own variables. The small
package `mlflow-skinny` is enough for a server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from milescli.core.errors import RecipeError
from milescli.trackers.base import KEY, TrackedRun, Tracker, require_package

VARIABLE = "MLFLOW_TRACKING_URI"
ID_TAG = "miles.run_id"
"""Tag by which a resumed run finds the one that was started before."""
_AT_ONCE = 100
"""Most parameters of one request."""
_LONGEST = 5000
"""Characters of a parameter; MLflow takes 6000."""
_STATUS = {"done": "FINISHED", "stopped": "KILLED"}


class MLflow(Tracker):
    """Sends the numbers of a run to MLflow."""

    def __init__(self, *, run: TrackedRun) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        experiment = self._client.get_experiment_by_name(run.project)
        where = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(run.project)
        )
        quote = '"' if "'" in run.id else "'"
        ours = f"tags.`{ID_TAG}` = {quote}{run.id}{quote}"
        known = self._client.search_runs([where], filter_string=ours)
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {ID_TAG: run.id, "miles.version": run.version}
        made = self._client.create_run(where, run_name=run.name, tags=tags)
        self._id = made.info.run_id
        values = [Param(key, _text(value)) for key, value in run.recipe.items()]
        for start in range(0, len(values), _AT_ONCE):
            self._client.log_batch(self._id, params=values[start : start + _AT_ONCE])

    @staticmethod
    def require() -> None:
        """Raise RecipeError if something is missing."""
        require_package("mlflow", tracker="mlflow")
        if not os.environ.get(VARIABLE):
            raise RecipeError(
                "mlflow needs a server",
                why=f"`{KEY}` names mlflow, but {VARIABLE} is not defined in the environment",
                fix=f"export {VARIABLE}=http://127.0.0.1:5000",
            )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        made = [Metric(name, float(value), now_ms, step) for name, value in scalars.items()]
        self._client.log_batch(self._id, metrics=made)

    def close(self, outcome: str) -> None:
        """Send what is buffered, and the outcome."""
        from mlflow.environment_variables import MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT

        MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.set(True)  # stdout is the run's own
        self._client.set_terminated(self._id, status=_STATUS.get(outcome, "FAILED"))


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:_LONGEST]
