"""Trackio: a database on this disk, in TRACKIO_DIR, that `trackio show` serves; or a Space of the
Hugging Face hub, where TRACKIO_SPACE_ID and HF_TOKEN are in the environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from milescli.trackers.base import TrackedRun, Tracker, require_package


class Trackio(Tracker):
    """Writes a run into Trackio, its numbers alone."""

    def __init__(self, *, run: TrackedRun) -> None:
        import trackio

        _silence("trackio")
        self._run: Any = trackio.init(
            run.project,
            name=run.id,  # by which it finds a run again
            config={"name": run.name, **run.recipe},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    @staticmethod
    def require() -> None:
        """Raise RecipeError where something is missing."""
        require_package("trackio", tracker="trackio")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        self._run.log(dict(scalars), step=step)

    def close(self, outcome: str) -> None:
        """Send what is left, and the outcome."""
        self._run.finish()


def _silence(package: str) -> None:
    """It prints on stdout, which is the run's own, and has no way to be asked not to. Its modules
    are given a `print` of their own, since stdout is of all threads."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            vars(module)["print"] = _say_nothing


def _say_nothing(*words: object, **options: object) -> None:
    """A print that does not."""
