"""Defines trackers, and loads those that `run.trackers` names: built in here, an entry point, or an
import path. Called by `runtime.tracking`, each in a thread of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from milescli.core.errors import RecipeError
from milescli.core.plug_points import TRACKERS
from milescli.core.user_code import name_of, plugin_fix
from milescli.recipe.machine import RunSettings

KEY = "run.trackers"
TENSORBOARD = "tensorboard"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Holds what a tracker knows of its run from the start. Each of several adapters is such a
    run."""

    name: str
    """Name for people: quickstart-1."""
    id: str
    """Unique id, which stays the same when the run is resumed: quickstart-1-4f2a90c1."""
    project: str
    """`run.project`."""
    folder: Path
    """The run's directory; a tracker's local files go below it."""
    version: str
    """Version of miles."""
    first_step: int = 0
    """Number of steps done before: 0, or that of the checkpoint from which the run resumes."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Every key by its dotted name, as JSON holds it. A recipe holds no secrets."""


class Tracker(Protocol):
    """Sends the metrics of one run to one tracker. All calls come from one thread, in order, and
    may be slow or raise: the run continues, and reports once that something is missing. A derived
    class ignores calls that it does not override."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record numbers of a step, a warm-up step or an evaluation, by the names of
        docs/metrics.md."""

    def event(self, record: Mapping[str, Any]) -> None:
        """Record any event: a line of events.jsonl, with `unix_s`, its time. Events with numbers
        come to both methods."""

    def close(self, outcome: str) -> None:
        """End with the outcome: done, stopped or failed. Send what is buffered. This is the last
        call."""


class TrackerFactory(Protocol):
    """Defines a plug-in of `run.trackers`: a class or a function. It may have a function
    `require()`, which is called before anything starts and raises RecipeError if something is
    missing."""

    def __call__(self, *, run: TrackedRun) -> Tracker:
        """Begin a run, or continue the one that began under `run.id`."""
        ...


def load_trackers(settings: RunSettings) -> dict[str, TrackerFactory]:
    """Load the trackers that `run.trackers` names. Raises RecipeError if one cannot be loaded, its
    package is not installed, or the environment lacks something."""
    made = {}
    for name in dict.fromkeys(settings.trackers):
        factory = made[name] = cast(TrackerFactory, TRACKERS.resolve(name))
        if (require := getattr(factory, "require", None)) is not None:
            require()
    return made


def require_package(module: str, *, tracker: str) -> None:
    """Raise RecipeError if a package is not installed; imports only the package above it."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise RecipeError(
            f"{tracker} is not installed",
            why=f"`{KEY}` names it, but the package `{module}` is not installed",
            fix=[f"pip install 'miles-cli[{tracker}]'", f"remove {tracker} from `{KEY}`"],
        )


_CALLS = ("log", "event", "close")


def check_tracker(factory: Callable[..., Any]) -> None:
    """Simulate two attempts at a run. Raises RecipeError."""
    with tempfile.TemporaryDirectory() as folder:
        for first_step in (0, 1):
            run = TrackedRun(
                name="quickstart-1",
                id="quickstart-1-4f2a90c1",
                project="miles",
                folder=Path(folder),
                version="0",
                first_step=first_step,
                recipe={"train.steps": 2, "data.eval": None},
            )
            tracker = factory(run=run)
            missing = [name for name in _CALLS if not callable(getattr(tracker, name, None))]
            if missing:
                raise RecipeError(
                    f"the tracker `{name_of(factory)}` lacks {', '.join(missing)}",
                    why=f"it creates a {type(tracker).__name__}; a run calls {', '.join(_CALLS)}",
                    fix=plugin_fix(factory, "it has all of milescli.trackers.base.Tracker"),
                )
            event = {"event": "PhaseStarted", "phase": "train", "detail": "", "unix_s": 1.8e9}
            tracker.event(event)
            tracker.log(first_step + 1, {"train/loss": 0.5, "rollout/reward_mean": 0.25})
            tracker.close("stopped" if first_step == 0 else "done")
