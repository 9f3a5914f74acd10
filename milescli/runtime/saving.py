"""Saves checkpoints of a run: decides when one is started and when it is complete, and writes its
manifest. The trainer writes the tensors."""

from __future__ import annotations

import asyncio
import hashlib
import shlex
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from milescli import __version__
from milescli.checkpoint.base import CheckpointManifest
from milescli.checkpoint.integrity import free_bytes
from milescli.checkpoint.run_dir import utc_now
from milescli.checkpoint.store import (
    CheckpointStore,
    StoredCheckpoint,
    save_failed,
    write_atomically,
)
from milescli.core.concurrency import in_thread
from milescli.core.errors import CheckpointError, MachineError, MilesError
from milescli.core.events import CheckpointSaved, EventBus, Notice
from milescli.core.files import read_regular_text
from milescli.core.types import WeightVersion
from milescli.core.units import format_bytes
from milescli.runtime.recovery.mirror import Mirror
from milescli.runtime.spec import RunSpec
from milescli.train.base import Trainer

LOOK_EVERY_S = 0.2
"""Seconds between two calls that ask idle ranks whether a checkpoint is written; they do not delay
a running step."""


def version_of(step: int) -> WeightVersion:
    """Return the weight version after `step` RL steps. Version 0 is what the engines loaded at
    start; 1 is the state after the warm-up."""
    return WeightVersion(step + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Holds a run's progress beside its weights, as in the manifest."""

    prompt_position: int = 0
    taken: list[int] = field(default_factory=list)
    objective: dict[str, float] = field(default_factory=dict)
    curriculum: dict[str, list[float]] = field(default_factory=dict)
    warmup_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingSave:
    trainer: Trainer
    step: int
    progress: Progress
    began: float


@dataclass(slots=True, kw_only=True)
class Saver:
    """Writes at most one checkpoint at a time. A checkpoint is valid once its manifest exists,
    which is written as soon as the tensors are on disk. If one cannot be written, it is reported
    and abandoned, and the next is tried again."""

    store: CheckpointStore
    spec: RunSpec
    bus: EventBus
    call_hook: Callable[..., Awaitable[None]]
    """Calls a hook of the user."""
    mirror: Mirror | None = None
    """Copies each complete checkpoint; None: no copies."""
    newest: Path | None = None
    """Newest checkpoint that this attempt completed."""
    newest_step: int | None = None
    """Step of that checkpoint, or of the one that the attempt continues from."""
    failure: CheckpointError | None = None
    """Why the last checkpoint that was started could not be written."""
    _unfinished: int | None = None
    """Step of a checkpoint that was started, and is neither complete nor given up."""
    _finishing: asyncio.Task[None] | None = None
    """Completes the checkpoint that is being written."""
    _hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if a caller waits for the checkpoint: the trainer may be delayed."""
    _completing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a manifest is written; its holder makes no calls to the trainer."""
    _recipe: str = field(init=False)
    """Text of recipe.yaml at the start of the run: the file may be lost or edited later."""

    def __post_init__(self) -> None:
        self._recipe = read_regular_text(self.spec.run.recipe_file)

    async def save(self, trainer: Trainer, *, step: int, progress: Progress) -> None:
        """Start checkpoint `step`. Returns when training may continue; the checkpoint is completed
        in the background. Raises CheckpointError if it cannot be written, but a resumed run would
        need it."""
        await self.settle()
        pending = _PendingSave(
            trainer=trainer, step=step, progress=progress, began=time.monotonic()
        )
        try:
            self._unfinished = step
            folder = await in_thread(lambda: self.store.begin(step))
            await trainer.save(folder)
        except OSError as error:
            await self._give_up(pending, error)
            return
        self._hurry.clear()
        self._finishing = asyncio.ensure_future(self._finish(pending))
        if not self.spec.recipe.checkpoint.async_save:
            await self.settle()

    async def settle(self) -> None:
        """Wait until the checkpoint in progress is complete, or given up. Raises as `save`."""
        if (finishing := self._finishing) is None:
            return
        self._hurry.set()
        try:
            await asyncio.shield(finishing)
        finally:
            if finishing.done() and self._finishing is finishing:
                self._finishing = None

    async def probe(self) -> None:
        """Raise what went wrong in the background."""
        if self._finishing is not None and self._finishing.done():
            await self.settle()

    async def close(self) -> None:
        """Stop, and leave an unfinished checkpoint as it is."""
        if self._finishing is not None:
            self._finishing.cancel()
            await asyncio.gather(self._finishing, return_exceptions=True)

    async def discard_unfinished(self) -> None:
        """Remove an unfinished checkpoint, once nobody writes any more."""
        if (step := self._unfinished) is not None:
            with suppress(OSError):
                await in_thread(lambda: self.store.discard(step))

    async def completed(self) -> None:
        """Wait until a manifest is written, if one is being written."""
        async with self._completing:
            pass

    async def _finish(self, pending: _PendingSave) -> None:
        """Once the tensors are on disk, write the manifest, and remove the oldest checkpoints
        beyond `checkpoint.keep`."""
        try:
            while not self._hurry.is_set() and not await pending.trainer.is_written():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), LOOK_EVERY_S)
            sha256 = await pending.trainer.finish_save()
            async with self._completing:
                stored = await in_thread(lambda: self._complete(pending, sha256))
                self.failure = self._unfinished = None
                self.newest, self.newest_step = stored.path, pending.step
                pending.trainer.note_saved()
        except OSError as error:
            await self._give_up(pending, error)
            return
        self.bus.emit(
            CheckpointSaved(
                step=pending.step,
                path=str(stored.path.relative_to(self.spec.run.path)),
                size_bytes=stored.manifest.size_bytes,
                seconds=time.monotonic() - pending.began,
            )
        )
        if self.mirror is not None:
            self.mirror.enqueue(pending.step)
        await self.call_hook("after_save", step=pending.step, folder=stored.path)

    def _complete(self, pending: _PendingSave, sha256: dict[str, str]) -> StoredCheckpoint:
        layout, file = self.spec.plan.trainer, self.spec.run.recipe_file
        if not file.exists():
            write_atomically(file, self._recipe)
        return self.store.complete(
            pending.step,
            CheckpointManifest(
                format="torch_dist",
                step=pending.step,
                version=version_of(pending.step),
                prompt_position=pending.progress.prompt_position,
                seed=self.spec.recipe.run.seed,
                plan_fingerprint=self.spec.plan.fingerprint,
                recipe=self._recipe,
                recipe_sha256=hashlib.sha256(self._recipe.encode()).hexdigest(),
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
                taken=pending.progress.taken,
                warmup_steps=pending.progress.warmup_steps,
            ),
            sha256=sha256,
        )

    async def _give_up(self, pending: _PendingSave, error: OSError) -> None:
        """Warn the user, and free the space of the incomplete folder. Raises the error if it is not
        about the disk, or if a resumed run would need this very checkpoint."""
        if isinstance(error, MilesError) and not isinstance(error, CheckpointError):
            raise error  # a wait that met its bound
        folder = self.store.path(pending.step)
        if not isinstance(error, CheckpointError):
            error = save_failed(folder, error)
        self.failure, self._unfinished = error, None
        pending.trainer.note_save_failed()
        with suppress(OSError):
            await in_thread(lambda: self.store.discard(pending.step))
        recipe = self.spec.recipe
        keeps = recipe.keeps_reference or recipe.caches_reference
        if keeps and recipe.reference_step(pending.step) == pending.step:
            error.why += "\na resumed run reads its reference from it, so the run ends here"
            raise error
        step = self._step_on_disk()
        newest = (
            "there is no earlier checkpoint"
            if step is None
            else f"the newest checkpoint is that of step {step}"
        )
        free = await in_thread(lambda: free_bytes(folder.parent))
        self.bus.emit(
            Notice(
                text=f"{error.what} ({error.why}); {format_bytes(free)} are free there. Training "
                f"continues, and the next save tries again; {newest}",
                level="warning",
            )
        )

    def _step_on_disk(self) -> int | None:
        """Return the step of the newest complete checkpoint; None if there is none. It may be that
        of an earlier attempt's warm-up."""
        steps = self.store.steps() if self.newest_step is None else [self.newest_step]
        return max(steps, default=None)

    def require_saved(self, step: int) -> None:
        """Raise MachineError if the run's last checkpoint, that of `step`, could not be written."""
        if self.failure is None or self.newest_step == step:
            return
        run = self.spec.run
        newest = self._step_on_disk()
        kept = "nothing else" if newest is None else f"checkpoint step {newest}"
        raise MachineError(
            f"the progress up to step {step} could not be saved",
            why=f"{self.failure.what}: {self.failure.why}\n"
            f"{format_bytes(free_bytes(run.path))} are free in {run.path}; it still has {kept}, "
            "and the metrics, events and samples up to here",
            fix=f"du -sh {shlex.quote(str(run.path.parent))}/*   # free some space",
        )
