"""What a tracker must bear, as a test that authors of plug-ins can run: `check_tracker(factory)`.
Not used by a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from milescli.core.errors import RecipeError
from milescli.core.user_code import mend, name_of
from milescli.trackers.base import TrackedRun

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
                    why=f"it makes a {type(tracker).__name__}; a run calls {', '.join(_CALLS)}",
                    fix=mend(factory, "it has all of milescli.trackers.base.Tracker"),
                )
            event = {"event": "PhaseStarted", "phase": "train", "detail": "", "unix_s": 1.8e9}
            tracker.event(event)
            tracker.log(first_step + 1, {"train/loss": 0.5, "rollout/reward_mean": 0.25})
            tracker.close("stopped" if first_step == 0 else "done")
