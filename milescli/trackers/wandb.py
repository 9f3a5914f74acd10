"""Weights & Biases. wandb itself reads the key from the environment, miles never does; with
WANDB_MODE=offline it only writes into the run's folder, for `wandb sync`."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from milescli.core.errors import RecipeError
from milescli.trackers.base import KEY, TrackedRun, Tracker, require_package

_INIT_S = 30.0
"""Time limit of the first answer of the service, in seconds."""
_WITHOUT_KEY = ("offline", "disabled", "dryrun")
_OPEN = set[str]()
"""Ids of open runs: all share one process of wandb."""
_CHANGING = threading.Lock()


class WeightsAndBiases(Tracker):
    """Sends the numbers of a run to Weights & Biases."""

    def __init__(self, *, run: TrackedRun) -> None:
        import wandb

        self._id = run.id
        with _CHANGING:
            _OPEN.add(run.id)
        # what it would say, and record of this process's output, is on the user's screen
        settings = wandb.Settings(silent=True, console="off", init_timeout=_INIT_S)
        try:
            wandb.setup(settings)  # else it speaks before `init` has read them
            self._run: Any = wandb.init(
                project=run.project,
                name=run.name,
                id=run.id,
                dir=str(run.folder),
                config=dict(run.recipe),
                resume="allow",
                reinit="create_new",  # several adapters in one process have a run each
                settings=settings,
            )
            self._run.define_metric("*", step_metric="step")
        except BaseException:
            _leave(run.id)
            raise

    @staticmethod
    def require() -> None:
        """Raise RecipeError if something is missing."""
        require_package("wandb", tracker="wandb")
        if not os.environ.get("WANDB_API_KEY") and os.environ.get("WANDB_MODE") not in _WITHOUT_KEY:
            raise RecipeError(
                "wandb needs a key",
                why=f"`{KEY}` names wandb, but WANDB_API_KEY is not defined in the environment",
                fix=["export WANDB_API_KEY=...", "export WANDB_MODE=offline"],
            )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        self._run.log({**scalars, "step": step})

    def close(self, outcome: str) -> None:
        """Send what is buffered, and the outcome."""
        try:
            self._run.summary["outcome"] = outcome
            self._run.finish(exit_code=0 if outcome == "done" else 1)
        finally:
            _leave(self._id)


def _leave(run_id: str) -> None:
    """End wandb's process after the last run. Otherwise it would count as a process of the run,
    which is ended, and wandb would report an error when this process exits."""
    import wandb

    with _CHANGING:
        _OPEN.discard(run_id)
        if not _OPEN:  # within the lock: who begins meanwhile has a process of its own
            wandb.teardown()
