"""Log-probs of a run's pairs by the weights that it begins from: computed once by the trainer, and
kept in the run directory, one number for each token."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from milescli.core.concurrency import in_thread
from milescli.core.types import Pair, Trajectory
from milescli.plan.types import Plan
from milescli.runtime.stop_flag import StopFlag
from milescli.train.base import TrainBatch, Trainer, sequence_of
from milescli.train.packing import pack

Row = TypeVar("Row")
CHUNK_TOKENS = 1 << 20
"""Sent to the ranks at once, about."""


class ReferenceCache:
    """One file for each run; equal rows of equal tokens find their numbers again."""

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
        """Those that are yet to be scored."""
        return [pair for pair in pairs if any(n not in self._known for n in _names(pair))]

    def known(self, pair: Pair) -> Pair:
        """The same with its log-probs, where all are there."""
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
    """Of its tokens; equal rows have equal ones."""
    return hashlib.blake2b(row.token_ids.tobytes(), digest_size=16).hexdigest()


def _names(pair: Pair) -> list[str]:
    return [fingerprint_of(side) for side in pair.sides]


def chunks_of(rows: Sequence[Row], sides: Callable[[Row], Sequence[Trajectory]]) -> list[list[Row]]:
    """The rows in parts of about CHUNK_TOKENS tokens."""
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
