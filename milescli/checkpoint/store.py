"""Step folders of one run: begun, completed by a manifest that is written last, found again, and forgotten oldest first."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from milescli.checkpoint.base import MANIFEST_NAME, CheckpointManifest
from milescli.core.errors import CheckpointError

PREFIX = "step_"


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
    """The `checkpoints/` folder of a run. Never touches anything outside it."""

    def __init__(self, folder: Path, *, keep: int = 2, protect: set[int] | None = None) -> None:
        """`keep` of the newest stay; steps in `protect` always do."""
        self.folder, self.keep, self.protect = folder, keep, protect or set()

    def path(self, step: int) -> Path:
        """The folder of a step, whether or not it is there."""
        return self.folder / f"{PREFIX}{step}"

    def begin(self, step: int) -> Path:
        """An empty folder to write tensors into."""
        path = self.path(step)
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        return path

    def complete(self, step: int, manifest: CheckpointManifest) -> StoredCheckpoint:
        """Write the manifest, then forget what is beyond `keep`."""
        path = self.path(step)
        files = {str(f.relative_to(path)): f.stat().st_size for f in sorted(path.rglob("*")) if f.is_file()}
        manifest = replace(manifest, files=files, size_bytes=sum(files.values()))
        fresh = path / f".{MANIFEST_NAME}"
        with fresh.open("w") as file:
            json.dump(asdict(manifest), file, indent=2, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path / MANIFEST_NAME)
        for old in self.steps()[: -self.keep]:
            if old not in self.protect:
                shutil.rmtree(self.path(old))
        return StoredCheckpoint(path=path, manifest=manifest)

    def steps(self) -> list[int]:
        """Complete steps, ascending."""
        found = [p.parent.name.removeprefix(PREFIX) for p in self.folder.glob(f"{PREFIX}*/{MANIFEST_NAME}")]
        return sorted(int(each) for each in found if each.isdigit())

    def latest(self) -> StoredCheckpoint | None:
        """The newest complete checkpoint."""
        steps = self.steps()
        return self.find(steps[-1]) if steps else None

    def find(self, step: int | None) -> StoredCheckpoint:
        """Checkpoint `step`, or the newest."""
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            raise CheckpointError(
                f"there is no complete checkpoint {'' if step is None else f'of step {step} '}in {self.folder}",
                why=f"complete: {', '.join(map(str, steps)) or 'none'}",
                fix=f"--step {steps[-1]}" if steps else f"miles resume {self.folder.parent}",
            )
        path = self.path(steps[-1] if step is None else step)
        raw = json.loads((path / MANIFEST_NAME).read_text())
        return StoredCheckpoint(path=path, manifest=CheckpointManifest(**raw))
