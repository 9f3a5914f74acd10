"""Stores a run's checkpoints in step folders: a manifest, written last, completes each; reading
verifies it; the oldest are removed first."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from milescli.checkpoint.base import MANIFEST_NAME, CheckpointManifest, checksum_of
from milescli.checkpoint.integrity import changed_file, sha256_of_files, sync, sync_tree
from milescli.checkpoint.run_dir import ADAPTERS, RECIPE_FILE, RunDir
from milescli.core.errors import CheckpointError
from milescli.core.files import read_json

PREFIX = "step_"
_STEP = re.compile(rf"^{PREFIX}(\d+)$")
_ASIDE = re.compile(rf"^\.{PREFIX}(\d+)\.replaced$")
ReadProgress = Callable[[int, int], AbstractContextManager[Callable[[int], None]]]
"""(step, bytes to read) -> context with a function that receives how many more bytes were read."""
Needs = Callable[[int], set[int]]
"""Step -> steps of the checkpoints without which a run cannot continue from it (its reference)."""


def needs_nothing(step: int) -> set[int]:
    """Return no steps: a run needs only the checkpoint that it continues from."""
    return set()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """Describes a complete checkpoint."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """Return the number of RL steps done."""
        return self.manifest.step


class CheckpointStore:
    """Manages the `checkpoints/` folder of a run. Never removes anything outside it. One process
    writes; others may read."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        needs: Needs = needs_nothing,
        watch: ReadProgress = lambda step, size_bytes: nullcontext(lambda num_bytes: None),
    ) -> None:
        """Keep the `keep` newest checkpoints, and those that they and the newest need, which do
        not count. `watch` reports the progress of reading a checkpoint."""
        self.folder, self.keep, self.needs = folder, keep, needs
        self.being_copied: frozenset[int] = frozenset()
        """Steps that somebody reads: they are removed after a later save."""
        self._watch = watch

    def path(self, step: int) -> Path:
        """Return the folder of a step, whether or not it exists."""
        return self.folder / f"{PREFIX}{step}"

    def begin(self, step: int) -> Path:
        """Create an empty folder for tensors, replacing any that exists. A complete checkpoint of
        this step is set aside until the new one is complete."""
        path, aside = self.path(step), self._aside(step)
        if step in self.steps():
            _remove_folder(aside)
            path.rename(aside)
        self._remove(step)
        path.mkdir(parents=True)
        return path

    def discard(self, step: int) -> None:
        """Remove the files of a failed save. A complete checkpoint stays, and one that the save was
        to replace is put back."""
        if step in self.incomplete_steps():
            self._remove(step)
        self._settle_aside(step)

    def put_back(self) -> None:
        """Put back the checkpoints that saves were to replace, if these saves were cut short. Only
        the process that writes may call this, before its first save."""
        if self.folder.is_dir():
            for path in list(self.folder.iterdir()):
                if match := _ASIDE.match(path.name):
                    self._settle_aside(int(match[1]))

    def _settle_aside(self, step: int) -> None:
        """Remove the checkpoint that was set aside if the new one is complete; otherwise put it
        back."""
        aside = self._aside(step)
        if (aside / MANIFEST_NAME).is_file() and step not in self.steps():
            self._remove(step)
            aside.rename(self.path(step))
        else:
            _remove_folder(aside)

    def _aside(self, step: int) -> Path:
        """Return the folder of a complete checkpoint while another one of its step is written."""
        return self.folder / f".{PREFIX}{step}.replaced"

    def complete(
        self, step: int, manifest: CheckpointManifest, *, sha256: Mapping[str, str] | None = None
    ) -> StoredCheckpoint:
        """Make all files durable, write the manifest, then remove checkpoints beyond `keep`.
        `sha256` holds the digests of files that their writer has hashed, by relative path. Raises
        OSError if the disk is full; then nothing is removed."""
        path = self.path(step)
        files = {
            str(f.relative_to(path)): f.stat().st_size
            for f in sorted(path.rglob("*"))
            if f.is_file()
        }
        known = {name: digest for name, digest in (sha256 or {}).items() if name in files}
        known |= sha256_of_files(path, [name for name in files if name not in known])
        sync_tree(path)
        manifest = replace(manifest, files=files, sha256=known, size_bytes=sum(files.values()))
        manifest = write_manifest(path, manifest)
        self._settle_aside(step)
        self._remove_old(step)
        return StoredCheckpoint(path=path, manifest=manifest)

    def _remove_old(self, newest: int) -> None:
        doomed = steps_to_remove(
            self.steps(),
            self.incomplete_steps(),
            newest=newest,
            keep=self.keep,
            needs=self.needs,
        )
        for step in doomed:
            if step not in self.being_copied:
                self._remove(step)

    def non_folder_entries(self) -> list[str]:
        """Return descriptions of the files and links that have the name of a checkpoint newer than
        the newest complete one, newest first. Only a user or a damaged disk puts them there."""
        if not self.folder.is_dir():
            return []
        newest = max(self.steps(), default=-1)
        found = {
            int(match[1]): path
            for path in self.folder.iterdir()
            if (match := _STEP.match(path.name)) and (path.is_symlink() or not path.is_dir())
        }
        return [
            f"{found[step]} is a {'link' if found[step].is_symlink() else 'file'}"
            for step in sorted(found, reverse=True)
            if step > newest
        ]

    def steps(self) -> list[int]:
        """Return the complete steps, ascending."""
        return [step for step in self._all_steps() if (self.path(step) / MANIFEST_NAME).is_file()]

    def incomplete_steps(self) -> list[int]:
        """Return the steps whose folder has no manifest: a save was interrupted, or is in
        progress."""
        complete = set(self.steps())
        return [step for step in self._all_steps() if step not in complete]

    def _all_steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        matches = [
            _STEP.match(path.name)
            for path in self.folder.iterdir()
            if path.is_dir() and not path.is_symlink()
        ]
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> StoredCheckpoint | None:
        """Return the newest complete checkpoint. Raises CheckpointError if its files have
        changed."""
        steps = self.steps()
        return self.find(steps[-1]) if steps else None

    def newest_intact(self) -> tuple[StoredCheckpoint | None, list[CheckpointError]]:
        """Return the newest intact checkpoint, and the errors of newer ones; (None, []) if no save
        was ever completed. Raises CheckpointError if there are checkpoints and none is intact."""
        fix = "continue from the checkpoint before it"
        damages = [
            CheckpointError(what, why="a checkpoint is a folder", fix=fix)
            for what in self.non_folder_entries()
        ]
        for step in reversed(self.steps()):
            try:
                return self._read(step), damages
            except CheckpointError as error:
                damages.append(error)
        lost = [
            f"{PREFIX}{step} was cut short while it was written" for step in self.incomplete_steps()
        ]
        if damages or any(step > 0 for step in self.incomplete_steps()):
            raise CheckpointError(
                f"no checkpoint in {self.folder} is intact",
                why="\n".join([*(f"{error.what}: {error.why}" for error in damages), *lost]),
                fix=[
                    f"restore the original files in {self.folder}",
                    f"miles launch --recipe {shlex.quote(f'{self.folder.parent}/recipe.yaml')} "
                    f"--name {shlex.quote(f'{self.folder.parent.name}-new')}   # a new run",
                ],
            )
        return None, damages

    def find(self, step: int | None) -> StoredCheckpoint:
        """Return checkpoint `step`, or the newest. Reads all its files. Raises CheckpointError if
        there is none, or if a file in its manifest is missing, or differs in size or content."""
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            incomplete = self.incomplete_steps()
            torn = bool(incomplete) if step is None else step in incomplete
            raise CheckpointError(
                f"there is no complete checkpoint {'' if step is None else f'of step {step} '}in "
                f"{self.folder}",
                why=f"complete: {', '.join(map(str, steps)) or 'none'}"
                + (
                    f"; {PREFIX}{incomplete[-1] if step is None else step} is incomplete, "
                    "because its writing was interrupted"
                    if torn
                    else ""
                ),
                fix=f"--step {steps[-1]}" if steps else self._other_commands(),
            )
        if step is None and (non_folder_entries := self.non_folder_entries()):
            raise CheckpointError(
                f"{non_folder_entries[0]}, and no checkpoint",
                why=f"it has the name of a newer step than {steps[-1]}, the newest checkpoint",
                fix=f"--step {steps[-1]}   # the newest checkpoint",
            )
        chosen = steps[-1] if step is None else step
        try:
            return self._read(chosen)
        except CheckpointError as error:
            if (before := self._newest_intact_before(chosen)) is not None:
                error.fixes.insert(0, f"--step {before}   # the newest whole one before it")
            raise

    def _other_commands(self) -> list[str]:
        """Return commands for a run without a checkpoint: those for its adapters, or to resume
        it."""
        run = self.folder.parent
        adapters = sorted(path for path in (run / ADAPTERS).glob("*") if path.is_dir())
        words = [f"{shlex.quote(str(path))}   # one of its adapters" for path in adapters]
        return words or [f"miles resume {shlex.quote(str(run))}"]

    def _newest_intact_before(self, step: int) -> int | None:
        for earlier in reversed([other for other in self.steps() if other < step]):
            with suppress(CheckpointError):
                return self._read(earlier).step
        return None

    def _read(self, step: int) -> StoredCheckpoint:
        path = self.path(step)
        fix = [f"put the file back as it was in {path}"]
        manifest = _parse(path / MANIFEST_NAME, fix=fix)
        what = f"the checkpoint {path} is damaged"
        for name, size in manifest.files.items():
            actual = (path / name).stat().st_size if (path / name).is_file() else None
            if actual != size:
                raise CheckpointError(
                    what,
                    why=f"`{name}` should have {size} bytes, but "
                    f"{'is missing' if actual is None else f'has {actual}'}",
                    fix=fix,
                )
        try:
            with self._watch(step, sum(manifest.files.values())) as progress:
                changed = changed_file(path, manifest.sha256, progress=progress)
        except OSError as error:
            raise CheckpointError(what, why=f"a file cannot be read: {error}", fix=fix) from error
        if changed is not None:
            name, now = changed
            raise CheckpointError(
                what,
                why=f"`{name}` was modified after it was written: its SHA-256 was "
                f"{manifest.sha256[name][:12]}... and is {now[:12]}...",
                fix=fix,
            )
        return StoredCheckpoint(path=path, manifest=manifest)

    def _remove(self, step: int) -> None:
        path = self.path(step)
        if path.is_symlink():
            raise CheckpointError(
                f"miles does not remove {path}",
                why="it is a link to another place, and miles removes nothing outside its run "
                "directory",
                fix=f"rm {path}",
            )
        _remove_folder(path)


def _remove_folder(path: Path) -> None:
    """Remove the folder of a checkpoint, if it exists."""
    if path.is_dir():
        # without its manifest, a folder that is removed by half is seen to be torn
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(path)


def steps_to_remove(
    complete: list[int], torn: list[int], *, newest: int, keep: int, needs: Needs
) -> list[int]:
    """Return the steps to remove when `newest` is complete: complete ones beyond the `keep` newest
    that no kept step needs, and incomplete ones before it. Steps after `newest` belong to an
    abandoned continuation of the run, and do not count as kept."""
    needed = needs(newest)
    ours = [step for step in sorted(complete) if step not in needed and step <= newest]
    needed = needed.union(*map(needs, ours[-keep:]))
    before = ours[:-keep] + [step for step in torn if step < newest]
    return [step for step in before if step not in needed]


def save_failed(folder: Path, why: str | OSError) -> CheckpointError:
    """Return the error of a failed save."""
    return CheckpointError(
        f"the checkpoint {folder} could not be written",
        why=why if isinstance(why, str) else f"{type(why).__name__}: {why}",
        fix=f"df -h {folder.parent}   # free some disk space",
    )


def restore_recipe(run: Path) -> bool:
    """Restore a run's lost recipe.yaml from its newest checkpoint. Return False if none has it."""
    text = next((one.recipe for one in _manifests(run) if one.recipe), "")
    if text:
        write_atomically(run / RECIPE_FILE, text)
    return bool(text)


def newest_recipe_sha256(run: Path) -> str | None:
    """Return the SHA-256 of the recipe.yaml of the newest checkpoint; None if there is none."""
    return next((one.recipe_sha256 for one in _manifests(run)), None)


def _manifests(run: Path) -> Iterator[CheckpointManifest]:
    """Yield the readable manifests of a run's checkpoints, the newest first."""
    store = CheckpointStore(RunDir(run).checkpoints)
    for step in reversed(store.steps()):
        with suppress(CheckpointError, OSError):
            yield _parse(store.path(step) / MANIFEST_NAME, fix=[])


def write_manifest(folder: Path, manifest: CheckpointManifest) -> CheckpointManifest:
    """Write the manifest of a checkpoint with its checksum, and return that manifest."""
    manifest = replace(manifest, checksum=checksum_of(asdict(manifest)))
    text = json.dumps(asdict(manifest), indent=2, sort_keys=True) + "\n"
    write_atomically(folder / MANIFEST_NAME, text)
    return manifest


def write_atomically(path: Path, text: str) -> None:
    """Write a file such that even after a power cut it has its old content or all of the new
    one."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    sync(part)
    part.replace(path)
    sync(path.parent)


def _parse(path: Path, *, fix: list[str]) -> CheckpointManifest:
    try:
        record = read_json(path)
        manifest = CheckpointManifest(**record)
        files = {str(name): int(size) for name, size in manifest.files.items()}
        sha256 = {str(name): str(digest) for name, digest in manifest.sha256.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"cannot read {path}", why=f"{type(error).__name__}: {error}", fix=fix
        ) from error
    if (written := str(manifest.checksum)) and written != checksum_of(record):
        raise CheckpointError(
            f"the manifest {path} was modified after it was written",
            why=f"its SHA-256 should be {written[:12]}... and is {checksum_of(record)[:12]}...",
            fix=fix,
        )
    if outside := [
        name for name in {**files, **sha256} if Path(name).is_absolute() or ".." in Path(name).parts
    ]:
        raise CheckpointError(
            f"`{path}` is outside the checkpoint",
            why=f"`{outside[0]}` lies outside the checkpoint",
            fix=fix,
        )
    return replace(manifest, files=files, sha256=sha256)
