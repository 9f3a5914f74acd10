"""What a teacher says of a run's rows, its likeliest tokens at each place: asked once of the
trainer's ranks, and kept in the run directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from milescli.core.concurrency import in_thread
from milescli.core.types import TeacherTokens, Trajectory
from milescli.plan.types import Plan
from milescli.runtime.reference_cache import batch_to_score, chunks_of, fingerprint_of
from milescli.runtime.stop_flag import StopFlag
from milescli.train.base import Trainer

Said = Callable[[Sequence[Trajectory]], Awaitable[list[TeacherTokens]]]
"""Asks served teachers about rows."""


class TeacherCache:
    """One file for each run, teacher and number of tokens; equal rows find their numbers again."""

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
        """Those that the teacher is yet to be asked about."""
        return [row for row in rows if fingerprint_of(row) not in self._known]

    def known(self, row: Trajectory) -> Trajectory:
        """The same with what the teacher said, where that is there."""
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
