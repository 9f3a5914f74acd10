"""What was computed of a run's rows is kept, also where the run ends in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milescli.conversion.base import fingerprint
from milescli.core.errors import CheckpointError, Stopped
from milescli.core.types import Pair, Trajectory
from milescli.runtime.inputs import row_caches as reference_cache
from milescli.runtime.inputs.row_caches import ReferenceCache, TeacherCache
from milescli.runtime.recovery.supervise import StopFlag
from tests.plans import PLAN
from tests.samples import make_trajectory

TOP_K = 4


class Ranks:
    """Asks for the end of the run when it answered once."""

    def __init__(self, stop: StopFlag, lengths: list[int]) -> None:
        """`lengths`: tokens of each line that it answers for."""
        self._stop, self._lengths = stop, lengths

    async def score_by_teachers(self, batch: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids and log-probs, (tokens, TOP_K) each."""
        self._stop.set()
        return [
            (np.full((n, TOP_K), n, np.int32), np.full((n, TOP_K), -n / 8, np.float32))
            for n in self._lengths
        ]

    async def score(self, batch: Any) -> list[np.ndarray]:
        """One log-prob for each token."""
        self._stop.set()
        return [np.full(n, -n / 8, np.float32) for n in self._lengths]


def _rows() -> list[Trajectory]:
    return [make_trajectory([1, 2], [3] * length) for length in (2, 5, 3)]


def _pairs() -> list[Pair]:
    return [
        Pair(index=index, chosen=row, rejected=make_trajectory([1, 2], [4]))
        for index, row in enumerate(_rows())
    ]


@pytest.mark.parametrize(
    ("made", "rows", "first"),
    [
        (lambda folder: _teacher(folder), _rows(), [4]),
        (lambda folder: ReferenceCache(folder / "kept"), _pairs(), [4, 3]),
    ],
    ids=["teacher", "reference"],
)
def test_what_was_computed_before_a_stop_is_not_asked_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[Path], Any],
    rows: list[Any],
    first: list[int],
) -> None:
    monkeypatch.setattr(reference_cache, "CHUNK_TOKENS", 1)

    async def stopped() -> None:
        stop = StopFlag()
        with pytest.raises(Stopped):
            await made(tmp_path).add(rows, trainer=Ranks(stop, first), plan=PLAN, stop=stop)

    asyncio.run(stopped())
    cache = made(tmp_path)
    assert len(cache.missing(rows)) == 2
    assert cache.with_numbers(rows[0]) != rows[0], "what was said of the first row is known"
    assert cache.with_numbers(rows[2]) == rows[2]


def test_a_teacher_with_other_files_is_asked_anew(tmp_path: Path) -> None:
    async def told() -> None:
        stop = StopFlag()
        ranks = Ranks(stop, [4, 7, 5])
        await _teacher(tmp_path).add(_rows(), trainer=ranks, plan=PLAN, stop=stop)

    asyncio.run(told())
    assert _teacher(tmp_path).missing(_rows()) == []
    (tmp_path / "model" / "config.json").write_text("{  }")
    assert len(_teacher(tmp_path).missing(_rows())) == 3


@pytest.mark.parametrize("damage", [lambda whole: whole[:-40], lambda _: b"", lambda _: b"torn"])
def test_a_damaged_file_is_named_and_need_only_be_deleted(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    async def told() -> None:
        ranks = Ranks(StopFlag(), [4, 3, 7, 3, 5, 3])
        await ReferenceCache(tmp_path / "a b").add(
            _pairs(), trainer=ranks, plan=PLAN, stop=StopFlag()
        )

    asyncio.run(told())
    (file,) = (tmp_path / "a b").iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError) as caught:
        ReferenceCache(tmp_path / "a b")
    assert caught.value.fixes[0].startswith(f"rm '{file}' ")


def _teacher(folder: Path) -> TeacherCache:
    (folder / "model").mkdir(exist_ok=True)
    if not (file := folder / "model" / "config.json").exists():
        file.write_text("{}")
    marks = [fingerprint(folder / "model", {})]
    return TeacherCache(folder / "kept", marks=marks, topk=TOP_K)
