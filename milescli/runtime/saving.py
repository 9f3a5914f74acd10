"""Checkpoints of a run: when one is begun, when it is complete, and what its manifest says. The
tensors are the trainer's business."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from milescli import __version__
from milescli.checkpoint.base import CheckpointManifest
from milescli.checkpoint.run_dir import utc_now
from milescli.checkpoint.store import CheckpointStore
from milescli.core.events import CheckpointSaved, EventBus
from milescli.core.types import WeightVersion
from milescli.runtime.spec import RunSpec
from milescli.train.base import Trainer


def version_of(step: int) -> WeightVersion:
    """Weight version of the weights after `step` RL steps. 0 is what the engines loaded at start; 1
    is the state after the warm-up."""
    return WeightVersion(step + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is, beside its weights; as the manifest has it."""

    prompt_position: int = 0
    objective: dict[str, float] = field(default_factory=dict)
    curriculum: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _PendingSave:
    trainer: Trainer
    folder: Path
    step: int
    progress: Progress
    began: float


@dataclass(slots=True, kw_only=True)
class Saver:
    """At most one checkpoint is being written at a time; it counts only when its manifest
    stands."""

    store: CheckpointStore
    spec: RunSpec
    bus: EventBus
    tell: Callable[..., Awaitable[None]]
    """Calls a hook of the user's."""
    on_complete: Callable[[], None] | None = None
    """Called when a checkpoint is complete."""
    newest: Path | None = None
    """Newest checkpoint that this attempt completed."""
    newest_step: int | None = None
    """Of that, or of the checkpoint that the attempt goes on from."""
    _pending: _PendingSave | None = None

    async def save(self, trainer: Trainer, *, step: int, progress: Progress) -> None:
        """Begin checkpoint `step`. Returns when training may go on; `settle` completes it."""
        await self.settle()
        began = time.monotonic()
        folder = self.store.begin(step)
        await trainer.save(folder)
        self._pending = _PendingSave(
            trainer=trainer,
            folder=folder,
            step=step,
            progress=progress,
            began=began,
        )
        if not self.spec.recipe.checkpoint.async_save:
            await self.settle()

    async def settle(self) -> None:
        """Wait for the files of the pending checkpoint, write its manifest, and forget the oldest
        beyond `checkpoint.keep`."""
        if (pending := self._pending) is None:
            return
        self._pending = None
        await pending.trainer.finish_save()
        layout = self.spec.plan.trainer
        stored = self.store.complete(
            pending.step,
            CheckpointManifest(
                format="torch_dist",
                step=pending.step,
                version=version_of(pending.step),
                prompt_position=pending.progress.prompt_position,
                seed=self.spec.recipe.run.seed,
                plan_fingerprint=self.spec.plan.fingerprint,
                recipe_sha256=self.spec.run.recipe_sha256,
                data_sha256=self.spec.inputs.data_sha256,
                layout={
                    name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "etp", "dp")
                },
                created=utc_now(),
                miles_version=__version__,
                size_bytes=0,
                files={},
                objective=pending.progress.objective,
                curriculum=pending.progress.curriculum,
            ),
        )
        self.newest, self.newest_step = stored.path, pending.step
        if self.on_complete is not None:
            self.on_complete()
        self.bus.emit(
            CheckpointSaved(
                step=pending.step,
                path=str(stored.path.relative_to(self.spec.run.path)),
                size_bytes=stored.manifest.size_bytes,
                seconds=time.monotonic() - pending.began,
            )
        )
        await self.tell("after_save", step=pending.step, folder=stored.path)
