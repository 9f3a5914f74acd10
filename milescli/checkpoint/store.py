"""Step folders of one run: begun, completed by a manifest that is written last, found again whole,
and forgotten oldest first."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from milescli.checkpoint.base import MANIFEST_NAME, CheckpointManifest
from milescli.core.errors import CheckpointError

PREFIX = "step_"
_STEP = re.compile(rf"^{PREFIX}(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A complete checkpoint."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """RL steps done."""
        return self.manifest.step


class CheckpointStore:
    """The `checkpoints/` folder of a run. Never removes anything outside it. One process writes;
    others may read."""

    def __init__(self, folder: Path, *, keep: int = 2, protect: set[int] | None = None) -> None:
        """`keep` of the newest stay; steps in `protect` always do, and do not count."""
        self.folder, self.keep, self.protect = folder, keep, protect or set()

    def path(self, step: int) -> Path:
        """The folder of a step, whether or not it is there."""
        return self.folder / f"{PREFIX}{step}"

    def begin(self, step: int) -> Path:
        """An empty folder to write tensors into. What lay there before, torn or complete, is
        gone."""
        self._remove(step)
        path = self.path(step)
        path.mkdir(parents=True)
        return path

    def complete(self, step: int, manifest: CheckpointManifest) -> StoredCheckpoint:
        """All files are there: make them durable, write the manifest, then forget what is beyond
        `keep`."""
        path = self.path(step)
        files = {
            str(f.relative_to(path)): f.stat().st_size
            for f in sorted(path.rglob("*"))
            if f.is_file()
        }
        for name in files:
            _sync(path / name)
        manifest = replace(manifest, files=files, size_bytes=sum(files.values()))
        write_atomically(
            path / MANIFEST_NAME, json.dumps(asdict(manifest), indent=2, sort_keys=True) + "\n"
        )
        _sync(self.folder)
        self._forget()
        return StoredCheckpoint(path=path, manifest=manifest)

    def _forget(self) -> None:
        complete = [step for step in self.steps() if step not in self.protect]
        doomed = complete[: -self.keep]
        doomed += [
            step
            for step in self.torn()
            if complete and step < complete[-1] and step not in self.protect
        ]
        for step in doomed:
            self._remove(step)

    def steps(self) -> list[int]:
        """Complete steps, ascending."""
        return [step for step in self._all_steps() if (self.path(step) / MANIFEST_NAME).is_file()]

    def torn(self) -> list[int]:
        """Steps whose folder has no manifest: a save that was cut short, or is under way."""
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
        """The newest complete checkpoint. Raises CheckpointError where its files are not whole."""
        steps = self.steps()
        return self.find(steps[-1]) if steps else None

    def find(self, step: int | None) -> StoredCheckpoint:
        """Checkpoint `step`, or the newest. Raises CheckpointError where there is none, or a file
        that its manifest lists is missing or has another size."""
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            torn = step in self.torn() if step is not None else bool(self.torn())
            raise CheckpointError(
                f"there is no complete checkpoint {'' if step is None else f'of step {step} '}in "
                f"{self.folder}",
                why=f"complete: {', '.join(map(str, steps)) or 'none'}"
                + (
                    f"; {PREFIX}{self.torn()[-1] if step is None else step} was cut short while it "
                    "was written"
                    if torn
                    else ""
                ),
                fix=f"--step {steps[-1]}" if steps else f"miles resume {self.folder.parent}",
            )
        chosen = steps[-1] if step is None else step
        manifest = self._read(chosen, others=[other for other in steps if other != chosen])
        return StoredCheckpoint(path=self.path(chosen), manifest=manifest)

    def _read(self, step: int, *, others: list[int]) -> CheckpointManifest:
        path = self.path(step)
        fix = (
            [f"rm -r {path}   # then go on from {PREFIX}{others[-1]}"]
            if others
            else [f"miles launch   # {path} is lost"]
        )
        manifest = _parse(path / MANIFEST_NAME, fix=fix)
        for name, size in manifest.files.items():
            actual = (path / name).stat().st_size if (path / name).is_file() else None
            if actual != size:
                raise CheckpointError(
                    f"the checkpoint {path} is torn",
                    why=f"`{name}` should have {size} bytes and "
                    f"{'is missing' if actual is None else f'has {actual}'}",
                    fix=fix,
                )
        return manifest

    def _remove(self, step: int) -> None:
        path = self.path(step)
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is not removed",
                why="it is a link to somewhere else, and miles removes nothing outside its run "
                "directory",
                fix=f"rm {path}",
            )
        if path.is_dir():
            # without its manifest, a folder that is removed by half is seen to be torn
            (path / MANIFEST_NAME).unlink(missing_ok=True)
            shutil.rmtree(path)


def write_atomically(path: Path, text: str) -> None:
    """The file has its old content or all of the new one, also after a power cut."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    _sync(part)
    part.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse(path: Path, *, fix: list[str]) -> CheckpointManifest:
    try:
        manifest = CheckpointManifest(**json.loads(path.read_text(encoding="utf-8")))
        files = {str(name): int(size) for name, size in manifest.files.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"cannot read {path}", why=f"{type(error).__name__}: {error}", fix=fix
        ) from error
    if outside := [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise CheckpointError(
            f"cannot read {path}", why=f"`{outside[0]}` lies outside the checkpoint", fix=fix
        )
    return replace(manifest, files=files)
