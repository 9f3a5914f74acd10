"""Computes what a frozen model predicts for the rows that a run learns from, once, and stores it in
the run directory: log-probs of the reference (`ReferenceCache`) and of a teacher
(`TeacherCache`)."""

from __future__ import annotations

import hashlib
import json
import shlex
import zipfile
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from milescli.core.concurrency import in_thread
from milescli.core.errors import CheckpointError
from milescli.core.types import Pair, TeacherTokens, Trajectory
from milescli.plan.types import Plan
from milescli.runtime.recovery.supervise import StopFlag
from milescli.train.base import TrainBatch, Trainer, sequence_of
from milescli.train.packing import images_of, pack

Row = TypeVar("Row", Trajectory, Pair)
Numbers = tuple[np.ndarray, ...]
"""[num_tokens, ...] arrays about one token sequence."""
AskTeachers = Callable[[Sequence[Trajectory]], Awaitable[list[TeacherTokens]]]
"""Returns the predictions of served teachers for rows."""
CHUNK_TOKENS = 1 << 20
"""Approximate number of tokens that are sent to the ranks at once."""


class RowCache(Generic[Row]):
    """Stores the numbers of a frozen model about the rows of a run, in one file of the run
    directory. Rows with equal tokens share their numbers."""

    def __init__(self, file: Path, *arrays: str) -> None:
        """Open the cache. `arrays`: names of the arrays of each sequence. Raises CheckpointError if
        the file is damaged."""
        self._file, self._arrays = file, arrays
        self._known: dict[str, Numbers] = {}
        """Fingerprint of a line's tokens -> its numbers."""
        if file.exists():
            self._known = _read(file, arrays)

    def missing(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that the model has not scored."""
        return [row for row in rows if self._numbers(row) is None]

    def with_numbers(self, row: Row) -> Row:
        """Return the row with its numbers if the model has scored it, else unchanged."""
        numbers = self._numbers(row)
        return row if numbers is None else self._joined(row, numbers)

    async def add(
        self, rows: Sequence[Row], *, trainer: Trainer, plan: Plan, stop: StopFlag
    ) -> None:
        """Score rows with the trainer's ranks and write the numbers to disk, also if the run is
        stopped before all are scored."""
        try:
            for chunk in chunks_of(rows):
                stop.check()
                lines = [line for row in chunk for line in trajectories_of(row)]
                scores = await self._score(lines, trainer, plan)
                self._known.update(zip(map(fingerprint_of, lines), scores, strict=True))
        finally:
            if self._known:
                await in_thread(self._write)

    def _joined(self, row: Row, numbers: list[Numbers]) -> Row:
        raise NotImplementedError

    async def _score(
        self, lines: Sequence[Trajectory], trainer: Trainer, plan: Plan
    ) -> list[Numbers]:
        raise NotImplementedError

    def _numbers(self, row: Row) -> list[Numbers] | None:
        numbers = [
            self._known[name]
            for name in map(fingerprint_of, trajectories_of(row))
            if name in self._known
        ]
        return numbers if len(numbers) == len(trajectories_of(row)) else None

    def _write(self) -> None:
        """Replace the file atomically."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        columns = list(zip(*self._known.values(), strict=True))
        joined = map(np.concatenate, columns)
        unfinished = self._file.with_suffix(".tmp.npz")
        np.savez(
            unfinished,
            names=np.array(list(self._known)),
            lengths=np.array([len(part) for part in columns[0]], np.int64),
            **dict(zip(self._arrays, joined, strict=True)),
        )
        unfinished.replace(self._file)


class ReferenceCache(RowCache[Pair]):
    """Stores the log-probs of a run's pairs under its initial weights, which the trainer computes
    once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "logprobs.npz", "values")

    def _joined(self, row: Pair, numbers: list[Numbers]) -> Pair:
        return replace(row, references=tuple(array("f", part.tobytes()) for (part,) in numbers))

    async def _score(
        self, lines: Sequence[Trajectory], trainer: Trainer, plan: Plan
    ) -> list[Numbers]:
        batch = await in_thread(lambda: batch_to_score(lines, plan))
        return [(score.astype(np.float32),) for score in await trainer.score(batch)]


class TeacherCache(RowCache[Trajectory]):
    """Stores the most likely tokens of a teacher at each position of a run's rows, with their
    log-probs. There is one file for each teacher and number of tokens."""

    def __init__(
        self, folder: Path, *, marks: Sequence[str], topk: int, served: AskTeachers | None = None
    ) -> None:
        """Open the cache of a teacher. `marks`: equal for equal teachers; `served`: sends rows to
        served teachers; None: the trainer's ranks hold the teachers."""
        self._topk, self._served = topk, served
        mark = hashlib.blake2b(json.dumps([topk, *marks]).encode(), digest_size=8).hexdigest()
        super().__init__(folder / f"{mark}.npz", "token_ids", "logprobs")

    def _joined(self, row: Trajectory, numbers: list[Numbers]) -> Trajectory:
        ((ids, logprobs),) = numbers
        teacher = TeacherTokens(
            token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), topk=self._topk
        )
        return replace(row, teacher=teacher)

    async def _score(
        self, lines: Sequence[Trajectory], trainer: Trainer, plan: Plan
    ) -> list[Numbers]:
        if self._served is None:
            batch = await in_thread(lambda: batch_to_score(lines, plan))
            return await trainer.score_by_teachers(batch)
        return [
            (
                np.frombuffer(reply.token_ids, np.int32).reshape(-1, self._topk),
                np.frombuffer(reply.logprobs, np.float32).reshape(-1, self._topk),
            )
            for reply in await self._served(lines)
        ]


def _read(file: Path, arrays: Sequence[str]) -> dict[str, Numbers]:
    try:
        with np.load(file, allow_pickle=False) as stored:
            ends = np.cumsum(stored["lengths"])[:-1]
            parts = (np.split(stored[name], ends) for name in arrays)
            return dict(zip(map(str, stored["names"]), zip(*parts, strict=True), strict=True))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{file} cannot be read",
            why=f"{error}; it holds what a frozen model says about the rows of the run",
            fix=f"rm {shlex.quote(str(file))}   # then resume: that model scores the rows again",
        ) from None


def trajectories_of(row: Trajectory | Pair) -> Sequence[Trajectory]:
    """Return the token sequences of a row: the row itself, or the sides of a pair."""
    return row.sides if isinstance(row, Pair) else [row]


def fingerprint_of(row: Trajectory) -> str:
    """Return a hash of the row's tokens and images; equal rows have equal ones."""
    shown = "".join(span.sha256 for span in row.image_spans)
    return hashlib.blake2b(row.token_ids.tobytes() + shown.encode(), digest_size=16).hexdigest()


def chunks_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Split the rows into parts of about CHUNK_TOKENS tokens."""
    chunks: list[list[Row]] = [[]]
    tokens = 0
    for row in rows:
        if tokens > CHUNK_TOKENS:
            chunks.append([])
            tokens = 0
        chunks[-1].append(row)
        tokens += sum(line.num_tokens for line in trajectories_of(row))
    return [chunk for chunk in chunks if chunk]


def batch_to_score(rows: Sequence[Trajectory], plan: Plan) -> TrainBatch:
    """Pack rows into a batch that a model scores."""
    return pack(
        [
            sequence_of(row, streams={}, token_weight=1.0, share=1.0, group=number)
            for number, row in enumerate(rows)
        ],
        objective="supervised",
        dp=plan.trainer.dp,
        max_tokens_per_microbatch=plan.batch.max_row_tokens(plan.trainer.cp),
        images=images_of(rows),
    )
