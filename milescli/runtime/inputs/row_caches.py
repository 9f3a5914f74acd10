"""What a frozen model says of the rows that a run learns from, computed once and kept in the run
directory: log-probs of the reference (`ReferenceCache`) and of a teacher (`TeacherCache`)."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from milescli.core.concurrency import in_thread
from milescli.core.types import Pair, TeacherTokens, Trajectory
from milescli.plan.types import Plan
from milescli.runtime.recovery.supervise import StopFlag
from milescli.train.base import TrainBatch, Trainer, sequence_of
from milescli.train.packing import pack

Row = TypeVar("Row")
CHUNK_TOKENS = 1 << 20
"""Sent to the ranks at once, about."""


class ReferenceCache:
    """Log-probs of a run's pairs by the weights that it begins from: the trainer computes them
    once, and the run directory keeps one number for each token. One file for each run; rows with
    equal tokens share their numbers."""

    def __init__(self, folder: Path) -> None:
        """`folder`: made where it is not there."""
        self._file = folder / "logprobs.npz"
        self._known: dict[str, array[float]] = {}
        """By fingerprint of a side's tokens."""
        if self._file.exists():
            with np.load(self._file, allow_pickle=False) as stored:
                parts = np.split(stored["values"], np.cumsum(stored["lengths"])[:-1])
                self._known = {
                    str(name): array("f", part.tobytes())
                    for name, part in zip(stored["names"], parts, strict=True)
                }

    def missing(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the rows that are yet to be scored."""
        return [pair for pair in pairs if any(n not in self._known for n in _names(pair))]

    def known(self, pair: Pair) -> Pair:
        """Return the row with its log-probs, where all are there."""
        names = _names(pair)
        if any(name not in self._known for name in names):
            return pair
        return replace(pair, references=tuple(self._known[name] for name in names))

    async def add(
        self, pairs: Sequence[Pair], *, trainer: Trainer, plan: Plan, stop: StopFlag
    ) -> None:
        """Score them by the weights that the trainer has now, and keep what came, also where the
        run is stopped in between."""
        try:
            for chunk in chunks_of(pairs, lambda pair: pair.sides):
                stop.check()
                sides = [side for pair in chunk for side in pair.sides]
                batch = await in_thread(lambda sides=sides: batch_to_score(sides, plan))
                scores = await trainer.score(batch)
                names = [name for pair in chunk for name in _names(pair)]
                for name, score in zip(names, scores, strict=True):
                    self._known[name] = array("f", score.astype(np.float32).tobytes())
        finally:
            if self._known:
                await in_thread(self._write)

    def _write(self) -> None:
        """Whole or not at all."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        values = list(self._known.values())
        unfinished = self._file.with_suffix(".tmp.npz")
        np.savez(
            unfinished,
            names=np.array(list(self._known)),
            lengths=np.array([len(value) for value in values], np.int64),
            values=np.concatenate([np.frombuffer(value, np.float32) for value in values]),
        )
        unfinished.replace(self._file)


def fingerprint_of(row: Trajectory) -> str:
    """Return a hash of the row's tokens; equal rows have equal ones."""
    return hashlib.blake2b(row.token_ids.tobytes(), digest_size=16).hexdigest()


def _names(pair: Pair) -> list[str]:
    return [fingerprint_of(side) for side in pair.sides]


def chunks_of(rows: Sequence[Row], sides: Callable[[Row], Sequence[Trajectory]]) -> list[list[Row]]:
    """Return the rows in parts of about CHUNK_TOKENS tokens."""
    chunks: list[list[Row]] = [[]]
    tokens = 0
    for row in rows:
        if tokens > CHUNK_TOKENS:
            chunks.append([])
            tokens = 0
        chunks[-1].append(row)
        tokens += sum(side.num_tokens for side in sides(row))
    return [chunk for chunk in chunks if chunk]


def batch_to_score(rows: Sequence[Trajectory], plan: Plan) -> TrainBatch:
    """Lines of tokens that models are to say something of."""
    return pack(
        [
            sequence_of(row, streams={}, token_weight=1.0, share=1.0, group=number)
            for number, row in enumerate(rows)
        ],
        objective="supervised",
        dp=plan.trainer.dp,
        max_tokens_per_microbatch=plan.batch.max_row_tokens(plan.trainer.cp),
    )


Said = Callable[[Sequence[Trajectory]], Awaitable[list[TeacherTokens]]]
"""Asks served teachers about rows."""


class TeacherCache:
    """What a teacher says of a run's rows, its likeliest tokens at each place: the trainer's ranks
    compute it once, and the run directory keeps it. One file for each run, teacher and number of
    tokens; equal rows share their numbers."""

    def __init__(
        self, folder: Path, *, marks: Sequence[str], topk: int, served: Said | None = None
    ) -> None:
        """`folder`: made where it is not there. `marks`: of the teachers, equal where they are;
        `served`: who is asked; None: the trainer's ranks."""
        self._topk, self._served = topk, served
        mark = hashlib.blake2b(json.dumps([topk, *marks]).encode(), digest_size=8).hexdigest()
        self._file = folder / f"{mark}.npz"
        self._known: dict[str, TeacherTokens] = {}
        """By fingerprint of a row's tokens."""
        if self._file.exists():
            self._read()

    def missing(self, rows: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the rows that the teacher has not been asked about."""
        return [row for row in rows if fingerprint_of(row) not in self._known]

    def known(self, row: Trajectory) -> Trajectory:
        """Return the row with the teacher's reply, where that is there."""
        return replace(row, teacher=self._known.get(fingerprint_of(row)))

    async def add(
        self, rows: Sequence[Trajectory], *, trainer: Trainer, plan: Plan, stop: StopFlag
    ) -> None:
        """Ask, and keep what came, also where the run is stopped in between."""
        try:
            for chunk in chunks_of(rows, lambda row: [row]):
                stop.check()
                if self._served is not None:
                    said = await self._served(chunk)
                else:
                    batch = await in_thread(lambda chunk=chunk: batch_to_score(chunk, plan))
                    told = await trainer.ask_teachers(batch)
                    said = [self._words(ids, logprobs) for ids, logprobs in told]
                names = map(fingerprint_of, chunk)
                self._known.update(zip(names, said, strict=True))
        finally:
            if self._known:
                await in_thread(self._write)

    def _words(self, ids: np.ndarray, logprobs: np.ndarray) -> TeacherTokens:
        return TeacherTokens(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), topk=self._topk)

    def _read(self) -> None:
        with np.load(self._file, allow_pickle=False) as stored:
            ends = np.cumsum(stored["lengths"])[:-1]
            parts = (np.split(stored[name], ends) for name in ("token_ids", "logprobs"))
            for name, ids, logprobs in zip(stored["names"], *parts, strict=True):
                self._known[str(name)] = self._words(ids, logprobs)

    def _write(self) -> None:
        """Whole or not at all."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        said = list(self._known.values())
        ids, logprobs = (
            [np.frombuffer(part, dtype).reshape(-1, self._topk) for part in parts]
            for parts, dtype in (
                ([one.token_ids for one in said], np.int32),
                ([one.logprobs for one in said], np.float32),
            )
        )
        unfinished = self._file.with_suffix(".tmp.npz")
        np.savez(
            unfinished,
            names=np.array(list(self._known)),
            lengths=np.array([len(part) for part in ids], np.int64),
            token_ids=np.concatenate(ids),
            logprobs=np.concatenate(logprobs),
        )
        unfinished.replace(self._file)
