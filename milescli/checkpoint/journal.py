"""A folder that appears under its name when it is whole. Until then it grows beside it, with a
journal of the files that are finished, so that an interrupted conversion goes on where it stopped.
Called by convert and export."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from milescli.checkpoint.files import sync_folder
from milescli.core.errors import CheckpointError

JOURNAL_NAME = "journal.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedFile:
    """Written, durable, and read back."""

    name: str
    """Path within the folder."""
    size_bytes: int
    crc32: int


def part_of(target: Path) -> Path:
    """Where `target` grows."""
    return target.with_name(f".{target.name}.part")


class PartFolder:
    """`.NAME.part` beside the target. A context manager; one process at a time. Left without
    `complete` or `discard`, it stays to be gone on with by the next one of the same
    `fingerprint`."""

    def __init__(self, target: Path, *, fingerprint: str) -> None:
        """`fingerprint`: of everything that decides what is written. Raises CheckpointError where
        the target is there already, or another process is writing it."""
        require_free(target)
        self.target, self.path, self._fingerprint = target, part_of(target), fingerprint
        self.finished: dict[str, FinishedFile] = {}
        """By name: what an earlier attempt left."""
        self.was_other = False
        """An earlier attempt of something else was there; it is gone."""
        self._journal: int | None = None

    def __enter__(self) -> PartFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._journal = os.open(
                self.path / JOURNAL_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644
            )
        except OSError as error:
            raise CheckpointError(
                f"`{self.target}` cannot be written",
                why=str(error),
                fix="choose a target that you may write to",
            ) from error
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._close()
            raise CheckpointError(
                f"`{self.target}` is being written by another process",
                why=f"it holds {self.path / JOURNAL_NAME}",
                fix="wait for it, or choose another name",
            ) from error
        self._read()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None

    def _read(self) -> None:
        lines = (
            (self.path / JOURNAL_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
        )
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except ValueError:
                break  # torn by a kill while it was written
        if records and records[0].get("fingerprint") == self._fingerprint:
            for record in records[1:]:
                file = FinishedFile(**record)
                path = self.path / file.name
                if path.is_file() and path.stat().st_size == file.size_bytes:
                    self.finished[file.name] = file
            return
        self.was_other = bool(records)
        for path in self.path.iterdir():
            if path.name != JOURNAL_NAME:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        assert self._journal is not None
        os.ftruncate(self._journal, 0)
        self._append({"fingerprint": self._fingerprint})

    @property
    def finished_bytes(self) -> int:
        """Of all files that are finished."""
        return sum(file.size_bytes for file in self.finished.values())

    def finish_file(self, file: FinishedFile) -> None:
        """Remember it, durably."""
        self.finished[file.name] = file
        self._append(asdict(file))

    def _append(self, record: dict[str, object]) -> None:
        assert self._journal is not None
        os.write(self._journal, json.dumps(record).encode() + b"\n")
        os.fsync(self._journal)

    def complete(self) -> None:
        """Everything is there and durable: it takes its name."""
        (self.path / JOURNAL_NAME).unlink()
        sync_tree(self.path)
        if self.target.is_dir():
            self.target.rmdir()
        self.path.rename(self.target)
        sync_folder(self.target.parent)

    def discard(self) -> None:
        """Nothing is left of it."""
        shutil.rmtree(self.path, ignore_errors=True)


def require_free(target: Path) -> None:
    """Raises CheckpointError where something is at `target` already; an empty folder is nothing."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise CheckpointError(
            f"`{target}` is there already",
            why="nothing is ever written over",
            fix=[
                f"choose another name, {target.with_name(target.name + '-2')} for instance",
                f"rm -r {target}",
            ],
        )


def sync_tree(folder: Path) -> None:
    """Make every small file of the folder and every name durable; large ones have been made so by
    who wrote them."""
    for path in (*folder.rglob("*"), folder):
        sync_folder(path)
