"""Copies a run's checkpoints to an object store (`checkpoint.mirror`): a thread uploads each
complete checkpoint with the records that `miles resume` needs, and removes old copies as the disk's
are removed. Only the end of the run waits for it, within a bound; if the store fails, the run
continues.

    URL/NAME/made/...            model and data that miles made for the run, once
    URL/NAME/step_N/run/...      recipe, plan, manifest, events, journal, as of this checkpoint
    URL/NAME/step_N/...          the checkpoint; its manifest.json is written last
"""

from __future__ import annotations

import asyncio
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from milescli.backends.stores.copies import upload
from milescli.backends.stores.store import ObjectStore, StoreError, open_store
from milescli.checkpoint.base import MANIFEST_NAME
from milescli.checkpoint.run_control import is_model_folder
from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.store import PREFIX, CheckpointStore, steps_to_remove
from milescli.core.errors import RecipeError
from milescli.core.events import CheckpointMirrored, Event, EventBus, Notice
from milescli.core.files import parse_json, read_regular_bytes, sha256_of
from milescli.core.units import format_duration
from milescli.recipe.schema import Recipe

MADE, RECORDS = "made", "run"
OWNER = ".miles-run"
"""Object that holds the id of the run whose copies these are."""
PAUSES_S = (1.0, 5.0, 20.0, 60.0)
"""Seconds between the attempts to upload one checkpoint."""
LOOK_S = 0.2
_UNREPORTED_WAIT_S = 1.0
"""Shorter waits are not reported."""
_SNAPSHOT = ".mirror"
"""Folder of the run with copies of the records to upload, because the run keeps writing its own."""
_INSTEAD = "--set checkpoint.mirror=null   # without copies"


def require_mirror(recipe: Recipe, run: RunDir) -> None:
    """Check that the store is writable, and holds no copies of another run. Call it on the main
    thread before processes start. Raises StoreError, RecipeError."""
    if (url := recipe.checkpoint.mirror) is None:
        return
    store, own = _store(url, run), run.tracking_id()
    owner = store.read(OWNER)
    if owner is None:
        store.write(OWNER, own.encode())
    elif owner.decode(errors="replace") != own:
        raise RecipeError(
            f"{store.url} holds the checkpoints of another run",
            why="a run never overwrites another one",
            fix=[
                f"--name {run.name}-2   # another name",
                f"miles resume {store.url}   # continue that run",
            ],
        )


def _store(url: str, run: RunDir) -> ObjectStore:
    return open_store(f"{url.rstrip('/')}/{run.name}", instead=_INSTEAD)


class Mirror:
    """Uploads the checkpoints of one run, one at a time. If a newer one is complete, an older one
    that still waits is skipped, unless the run needs it for its reference."""

    def __init__(
        self,
        store: ObjectStore,
        run: RunDir,
        checkpoints: CheckpointStore,
        *,
        pauses_s: tuple[float, ...] = PAUSES_S,
    ) -> None:
        self.store, self._run, self._checkpoints = store, run, checkpoints
        self._pauses_s = pauses_s
        self.failure = ""
        """Why the checkpoint that was tried last is not there; empty if it is."""
        self._news: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._sha256_of_made: dict[str, str] = {}
        self._copied: set[int] = set()
        """Steps that this attempt has copied."""
        self._waiting: list[int] = []
        self._current: int | None = None
        self._changed = threading.Condition()
        self._is_closed = self._is_removal_told = False
        self._thread = threading.Thread(target=self._upload_loop, name="mirror", daemon=True)

    @classmethod
    def of(cls, recipe: Recipe, run: RunDir, checkpoints: CheckpointStore) -> Mirror | None:
        """Return the mirror that the recipe wants; None if it wants none."""
        url = recipe.checkpoint.mirror
        return None if url is None else cls(_store(url, run), run, checkpoints)

    def begin(self) -> None:
        """Start the thread, first with uploads that an earlier attempt may have left unfinished."""
        if complete := self._checkpoints.steps():
            self.enqueue(complete[-1])
        self._thread.start()

    def enqueue(self, step: int) -> None:
        """Queue a complete checkpoint for upload, without waiting. Checkpoints that the run needs
        for its reference come first, until they are copied."""
        with self._changed:
            needed = self._checkpoints.needs(step) - self._copied - {step}
            self._waiting = [one for one in self._checkpoints.steps() if one in needed] + [step]
            self._changed.notify_all()

    def close(self) -> None:
        """Stop and leave unfinished uploads; the next attempt continues them."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def has_pending(self) -> bool:
        """Return True if a checkpoint is being copied, or is queued."""
        with self._changed:
            return self._thread.is_alive() and bool(self._waiting or self._current is not None)

    def emit_news(self, bus: EventBus) -> None:
        """Emit the events since the last call, on the caller's thread."""
        with suppress(queue.Empty):
            while True:
                bus.emit(self._news.get_nowait())

    async def finish(self, bus: EventBus, *, bound_s: float, gives_up: Callable[[], bool]) -> None:
        """Wait until the copies are complete, at most `bound_s`, or until `gives_up`; report what
        is missing."""
        began, is_told = time.monotonic(), False
        while self.has_pending and not gives_up() and time.monotonic() - began < bound_s:
            if not is_told and time.monotonic() - began > _UNREPORTED_WAIT_S:
                is_told = True
                bound = format_duration(bound_s)
                text = f"waiting at most {bound} until {self.store.url} has the checkpoint"
                bus.emit(Notice(text=text))
            self.emit_news(bus)
            await asyncio.sleep(LOOK_S)
        is_late = self.has_pending
        self.close()
        self.emit_news(bus)
        if is_late or self.failure:
            why = self.failure or f"it was not complete after {format_duration(bound_s)}"
            text = f"{self.store.url} lacks the newest checkpoint, which is in {self._run.shown}"
            bus.emit(Notice(text=f"{text}: {why}", level="warning"))

    # ------------------------------------------------------------------ in the thread

    def _upload_loop(self) -> None:
        while (step := self._next()) is not None:
            try:
                self._try(step)
            finally:
                self._checkpoints.being_copied = frozenset()
                with self._changed:
                    self._current = None

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._waiting)
            if self._is_closed:
                return None
            self._current = self._waiting.pop(0)
            self._checkpoints.being_copied = frozenset({self._current})
            return self._current

    def _try(self, step: int) -> None:
        for pause_s in (*self._pauses_s, None):
            began = time.monotonic()
            try:
                num_bytes = self._copy(step)
            except Exception as error:  # nothing that happens here may end the run
                if step not in self._checkpoints.steps():
                    return  # removed by a newer save before its turn came
                self._on_failure(step, error)
                is_final = isinstance(error, StoreError) and error.is_final
                if pause_s is None or is_final or self._is_overtaken(pause_s):
                    return
                continue
            self.failure = ""
            self._copied.add(step)
            self._news.put(
                CheckpointMirrored(
                    step=step,
                    url=self.store.url,
                    size_bytes=num_bytes,
                    seconds=time.monotonic() - began,
                )
            )
            self._remove_old_copies(step)
            return

    def _is_overtaken(self, pause_s: float) -> bool:
        """Wait; return True as soon as something newer waits, or the mirror is closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed or self._waiting, pause_s)

    def _on_failure(self, step: int, error: Exception) -> None:
        what = getattr(error, "what", type(error).__name__)
        why = f"{what} ({getattr(error, 'why', error)})"
        if not self.failure:
            text = f"checkpoint step {step} could not be copied: {why}. The run goes on, and tries "
            self._news.put(
                Notice(text=f"{text}again, at the latest at its next save", level="warning")
            )
        self.failure = why

    def _copy(self, step: int) -> int:
        """Upload what is missing; a complete copy stays as it is. Returns the number of bytes
        sent."""
        folder = self._checkpoints.path(step)
        text = read_regular_bytes(folder / MANIFEST_NAME)
        if self.store.read(f"{folder.name}/{MANIFEST_NAME}") == text:
            return 0
        made, sent = dict(_made_by(self._run)), 0
        for name, file in made.items():
            if name not in self._sha256_of_made:
                self._sha256_of_made[name] = sha256_of(file)
        if made:
            known = self._sha256_of_made
            sent = upload(self.store, made, sha256=known, last=max(made), below=MADE)
        manifest = parse_json(text)
        names = [*manifest["files"], MANIFEST_NAME]
        snapshot = self._run.path / _SNAPSHOT
        try:
            records = _snapshot(self._run, snapshot)
            files = {name: folder / name for name in names} | records
            sent += upload(
                self.store,
                files,
                sha256=manifest["sha256"],
                last=MANIFEST_NAME,
                below=folder.name,
            )
        finally:
            shutil.rmtree(snapshot, ignore_errors=True)
        return sent

    def _remove_old_copies(self, newest: int) -> None:
        """Remove the copies of checkpoints that the disk does not keep either."""
        try:
            found = objects_of_steps(self.store)
            complete = [step for step, names in found.items() if MANIFEST_NAME in names]
            doomed = steps_to_remove(
                complete,
                [step for step in found if step not in complete],
                newest=newest,
                keep=self._checkpoints.keep,
                needs=self._checkpoints.needs,
            )
            for step in doomed:
                # without its manifest, a copy that is removed by half is seen to be incomplete
                names = sorted(found[step], key=lambda name: name != MANIFEST_NAME)
                self.store.remove([f"{PREFIX}{step}/{name}" for name in names])
        except StoreError as error:
            if not self._is_removal_told:
                self._is_removal_told = True
                text = f"old copies in {self.store.url} could not be removed: {error.why}"
                self._news.put(Notice(text=text, level="warning"))


def objects_of_steps(store: ObjectStore) -> dict[int, list[str]]:
    """Return the objects of each step's copy, by their paths in it; a complete one has
    MANIFEST_NAME among them. Raises StoreError."""
    found: dict[int, list[str]] = {}
    for name in store.sizes():
        folder, _, rest = name.partition("/")
        if match := re.fullmatch(rf"{PREFIX}(\d+)", folder):
            found.setdefault(int(match[1]), []).append(rest)
    return found


def _made_by(run: RunDir) -> list[tuple[str, Path]]:
    """Return (path in the run, file) of the models and data that miles made for the run; they never
    change."""
    folders = [one for one in run.path.iterdir() if one.is_dir() and not one.is_symlink()]
    made = [one for one in folders if one == run.data_dir or is_model_folder(one.name)]
    files = (file for folder in made for file in sorted(folder.rglob("*")) if file.is_file())
    return [(str(file.relative_to(run.path)), file) for file in files]


def _snapshot(run: RunDir, into: Path) -> dict[str, Path]:
    """Copy the records that a resumed run reads. Returns them by their paths in the copy."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    run.tracking_id()
    single = (run.recipe_file, run.plan_file, run.manifest_file, run.events_file, run.note_file)
    files = [*single, run.metrics_file, run.path / ".tracking-id", *run.journal_files]
    copied = {}
    for file in files:
        name = str(file.relative_to(run.path))
        with suppress(FileNotFoundError):  # never written, or removed meanwhile
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            copied[f"{RECORDS}/{name}"] = Path(shutil.copyfile(file, into / name))
    return copied
