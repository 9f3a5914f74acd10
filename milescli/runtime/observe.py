"""Who watches a run: events.jsonl, metrics.jsonl, TensorBoard, Weights & Biases. Listeners only;
they never steer and never stop a run."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from milescli.checkpoint.integrity import free_bytes
from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import RecipeError
from milescli.core.events import (
    EvalDone,
    Event,
    EventBus,
    RowStepDone,
    StepDone,
    ValidationDone,
    WarmupStepDone,
    stamped,
)
from milescli.recipe.machine import RunSettings
from milescli.runtime.side_files import LineFile, SideFiles

_TENSORBOARD_NEEDS = 2**20
"""Bytes that are free before scalars are handed to it."""
_ROW_SECONDS = ("pack_s", "train_s", "save_s", "step_s")


class EventLog:
    """events.jsonl: everything that happened, one JSON object a line."""

    def __init__(self, file: Path) -> None:
        self._file = LineFile(file)

    def __call__(self, event: Event) -> None:
        """Write one line."""
        self._file.write(json.dumps(stamped(event)))


class MetricLog:
    """metrics.jsonl: the scalars of each step under flat names."""

    def __init__(self, file: Path) -> None:
        self._file = LineFile(file)

    def __call__(self, event: Event) -> None:
        """Write one line for an event that carries scalars."""
        if (scalars := scalars_of(event)) is not None:
            step, values = scalars
            self._file.write(json.dumps({"step": step, **values}))


class TensorBoard:
    """Scalars for `tensorboard --logdir runs`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer: Any = SummaryWriter(str(folder), flush_secs=10)

    def __call__(self, event: Event) -> None:
        """Add the scalars of an event."""
        if (scalars := scalars_of(event)) is not None:
            step, values = scalars
            if free_bytes(self._folder) < _TENSORBOARD_NEEDS:
                # its writer is a thread that a failed write ends for good
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)


class WeightsAndBiases:
    """Scalars for wandb; the key is read from the environment by wandb itself, never by us."""

    def __init__(self, project: str, run: RunDir) -> None:
        wandb = require_wandb(project)
        own = {"project": project, "name": run.full_name, "id": run.full_name}
        # several adapters in one process have a run each
        self._run: Any = wandb.init(**own, dir=str(run.path), resume="allow", reinit="create_new")

    def __call__(self, event: Event) -> None:
        """Log the scalars of an event."""
        if (scalars := scalars_of(event)) is not None:
            step, values = scalars
            self._run.log({**values, "step": step})


def require_wandb(project: str) -> Any:
    """The package. Raises RecipeError where it is not there, or has no key."""
    try:
        import wandb
    except ImportError:
        raise RecipeError(
            "wandb is not installed",
            why=f"`run.wandb_project={project}` asks for it",
            fix=["pip install 'miles-cli[wandb]'", "--set run.wandb_project=null"],
        ) from None
    if not os.environ.get("WANDB_API_KEY") and os.environ.get("WANDB_MODE") != "offline":
        raise RecipeError(
            "wandb has no key",
            why="`run.wandb_project` is set, and WANDB_API_KEY is not in the environment",
            fix=["export WANDB_API_KEY=...", "export WANDB_MODE=offline"],
        )
    return wandb


def scalars_of(event: Event) -> tuple[int, dict[str, float]] | None:
    """(step, name -> value) of an event, or None where it carries none. Names: train/, rollout/,
    reward/, agent/, time/, publish/, flow/, speed/, eval/, validation/, warmup/."""
    if isinstance(event, StepDone):
        report = asdict(event.report)
        report |= report.pop("figures")
        values = {f"train/{name}": value for name, value in report.items()}
        rollout = asdict(event.rollout)
        parts, figures = rollout.pop("reward_parts"), rollout.pop("figures")
        rollout.pop("reward_histogram")  # no scalar
        # None: of what the run does not do
        told = {name: value for name, value in rollout.items() if value is not None}
        values |= {f"rollout/{name}": value for name, value in told.items()}
        values |= {f"reward/{name}": value for name, value in parts.items()}
        values |= {f"agent/{name}": value for name, value in figures.items()}
        values |= {f"time/{name}": value for name, value in asdict(event.seconds).items()}
        values |= {f"publish/{name}": value for name, value in asdict(event.publish).items()}
        values |= {f"flow/{name}": value for name, value in asdict(event.flow).items()}
        values |= {
            "speed/rollout_tokens_per_s": event.rollout_tokens_per_s,
            "speed/train_tokens_per_s": event.train_tokens_per_s,
        }
        return event.step, {**values, "weights/version": event.version}
    if isinstance(event, WarmupStepDone):
        return event.step, {
            "warmup/loss": event.report.loss,
            "warmup/grad_norm": event.report.grad_norm,
            "warmup/step_s": event.step_s,
        }
    if isinstance(event, RowStepDone):
        report = asdict(event.report)
        report |= report.pop("figures")
        # nobody sampled these tokens, so that nobody can differ about them
        values = {f"train/{name}": value for name, value in report.items() if "logprob" not in name}
        values |= {f"time/{name}": getattr(event, name) for name in _ROW_SECONDS}
        return event.step, {
            **values,
            "train/epoch": event.epoch,
            "speed/train_tokens_per_s": event.tokens_per_s,
        }
    if isinstance(event, ValidationDone):
        figures = {f"validation/{name}": value for name, value in event.figures.items()}
        return event.step, {"validation/loss": event.loss, **figures}
    if isinstance(event, EvalDone):
        return event.step, {
            "eval/accuracy": event.accuracy,
            "eval/truncated_fraction": event.truncated_fraction,
            "eval/response_tokens_mean": event.response_tokens_mean,
            **{f"eval/{name}": value for name, value in event.figures.items()},
        }
    return None


def attach(bus: EventBus, run: RunDir, settings: RunSettings, *, has_scalars: bool = True) -> None:
    """Let the recipe's observers listen; what they cannot write is told of once. `has_scalars`:
    else it is a run whose adapters have them. Raises RecipeError where one was asked for and cannot
    be had."""
    side = SideFiles(bus)

    def listen(listener: Callable[[Event], None], path: Path) -> None:
        def guarded(event: Event) -> None:
            with side.writing(path):
                listener(event)

        bus.listeners.append(guarded)

    listen(EventLog(run.events_file), run.events_file)
    if not has_scalars:
        if settings.wandb_project:
            require_wandb(settings.wandb_project)
        return
    listen(MetricLog(run.metrics_file), run.metrics_file)
    if settings.tensorboard:
        listen(TensorBoard(run.tensorboard_dir), run.tensorboard_dir / "events")
    if settings.wandb_project:
        bus.listeners.append(WeightsAndBiases(settings.wandb_project, run))
