"""What a teacher says of a run's rows, its likeliest tokens at each place: asked once of the
trainer's ranks, and kept in the run directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from milescli.conversion.base import fingerprint
from milescli.core.concurrency import in_thread
from milescli.core.types import TeacherTokens, Trajectory
from milescli.plan.types import Plan
from milescli.runtime.reference_cache import batch_to_score, chunks_of, fingerprint_of
from milescli.runtime.stop_flag import StopFlag
from milescli.train.base import Trainer


class TeacherCache:
    """One file for each run, teacher and number of tokens; equal rows find their numbers again."""

    def __init__(self, folder: Path, *, teachers: Sequence[Path], topk: int) -> None:
        """`folder`: made where it is not there. `teachers`: their Hugging Face folders."""
        self._topk = topk
        asked = json.dumps([topk, *(fingerprint(teacher, {}) for teacher in teachers)])
        mark = hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()
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
                batch = await in_thread(lambda chunk=chunk: batch_to_score(chunk, plan))
                said = await trainer.ask_teachers(batch)
                for row, (ids, logprobs) in zip(chunk, said, strict=True):
                    self._known[fingerprint_of(row)] = TeacherTokens(
                        token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), topk=self._topk
                    )
        finally:
            if self._known:
                await in_thread(self._write)

    def _read(self) -> None:
        with np.load(self._file, allow_pickle=False) as stored:
            ends = np.cumsum(stored["lengths"])[:-1]
            parts = (np.split(stored[name], ends) for name in ("token_ids", "logprobs"))
            for name, ids, logprobs in zip(stored["names"], *parts, strict=True):
                self._known[str(name)] = TeacherTokens(
                    token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), topk=self._topk
                )

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
