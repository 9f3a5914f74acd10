"""Trackio: a database on this disk, in TRACKIO_DIR, that `trackio show` serves; or a Space of the
Hugging Face hub, if TRACKIO_SPACE_ID and HF_TOKEN are in the environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from milescli.trackers.base import TrackedRun, Tracker, require_package


class Trackio(Tracker):
    """Writes the numbers of a run to Trackio."""

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
        """Raise RecipeError if something is missing."""
        require_package("trackio", tracker="trackio")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        self._run.log(dict(scalars), step=step)

    def close(self, outcome: str) -> None:
        """Send what is buffered, and the outcome."""
        self._run.finish()


def _silence(package: str) -> None:
    """Give the package's modules a `print` of their own: it prints on stdout, which belongs to the
    run, has no option against it, and stdout cannot be redirected for one thread."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            vars(module)["print"] = _say_nothing


def _say_nothing(*words: object, **options: object) -> None:
    """Print nothing."""
