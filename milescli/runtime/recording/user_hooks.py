"""Calls the user's functions that receive what a run does: `run.hooks.*`, each by import path. They
run in a process of their own, one at a time, within a time limit; if one raises, the run ends with
an error that names it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from milescli.core.concurrency import in_thread
from milescli.core.events import Event
from milescli.core.examples import example_groups
from milescli.core.plug_points import HOOKS
from milescli.core.scalars import scalars_of
from milescli.core.types import StepReport
from milescli.recipe.schema import Recipe
from milescli.workers.isolated import resolve_isolated


class UserHooks:
    """Holds the hooks that a recipe names. Belongs to one event loop."""

    def __init__(self, recipe: Recipe) -> None:
        """Load the hooks. Raises RecipeError if one cannot be loaded or does not accept its
        arguments."""
        settings = recipe.run.hooks
        self._calls: dict[str, Callable[..., Any]] = {}
        for point in HOOKS:
            if (path := getattr(settings, point.kind)) is not None:
                self._calls[point.kind] = resolve_isolated(
                    point,
                    path,
                    bound_s=settings.timeout_s,
                    longer=f"--set run.hooks.timeout_s={2 * settings.timeout_s:g}",
                )

    async def call(self, hook: str, *, event: Event | None = None, **arguments: Any) -> None:
        """Call a hook; do nothing if the recipe does not name it, or if the `event` for a tracker
        has no scalars. Raises RecipeError if it raises, or takes longer than its limit."""
        if hook not in self._calls:
            return
        if event is not None:
            if (scalars := scalars_of(event)) is None:
                return
            arguments = dict(zip(("step", "scalars"), scalars, strict=True))
        await in_thread(lambda: self._calls[hook](**arguments))


def check_all_samples(hook: Callable[..., Any]) -> None:
    """Call the hook as a run would."""
    first, *others = example_groups()
    hook(step=1, groups=others, refused=[first])


def check_before_step(hook: Callable[..., Any]) -> None:
    """Call the hook as a run would."""
    hook(step=1, groups=example_groups())


def check_after_step(hook: Callable[..., Any]) -> None:
    """Call the hook as a run would."""
    hook(step=1, report=_REPORT, groups=example_groups())


def check_after_save(hook: Callable[..., Any]) -> None:
    """Call the hook as a run would, with a folder that contains a file."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "manifest.json").write_text("{}", encoding="utf-8")
        hook(step=1, folder=Path(folder))


def check_tracker(hook: Callable[..., Any]) -> None:
    """Call the hook as a run would."""
    hook(step=1, scalars={"train/loss": 0.5, "rollout/reward_mean": 0.25})


_REPORT = StepReport(
    loss=0.5,
    grad_norm=1.0,
    lr=1e-6,
    logprob_diff_mean=0.0,
    logprob_diff_max=0.0,
    logprob_diff_tokens=0,
    num_tokens=100,
    num_loss_tokens=50,
    num_microbatches=1,
    forward_backward_s=1.0,
    optimizer_s=0.1,
    figures={"policy_loss": 0.5, "entropy": 1.0},
)
