"""Histories are read once, by one reader, and forgotten."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from milescli.insight import reader
from milescli.web import histories
from milescli.web.histories import Histories
from milescli.web.responses import Busy
from tests.fake_run import WrittenRun


def test_what_was_read_is_not_read_again(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    held, fed = Histories(), list[int]()
    update = reader.RunReader.update

    def counted(one: reader.RunReader) -> int:
        fed.append(update(one))
        return fed[-1]

    monkeypatch.setattr(reader.RunReader, "update", counted)
    run.steps(1, 9)
    for _ in range(3):
        with held.reading(run.run) as history:
            assert history.step == 9
    run.steps(10, 11)
    with held.reading(run.run) as history:
        assert history.step == 11
    assert fed == [9, 0, 0, 2]


def test_many_at_once_read_one_history(run: WrittenRun) -> None:
    run.steps(1, 200)
    held, seen = Histories(), list[object]()

    def read() -> None:
        with held.reading(run.run) as history:
            seen.append(history)
            assert list(history.columns["train/loss"]) == [0.01] * 200

    threads = [threading.Thread(target=read, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(seen) == 8 and len({id(one) for one in seen}) == 1


def test_so_many_are_held_and_all_that_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else pages that follow more runs than that would read them anew at each look."""
    runs = [WrittenRun(path=tmp_path / f"tiny-{n}").run for n in range(histories.MAX_CACHED + 4)]
    held, seen = Histories(), list[list[object]]()
    for _ in range(2):
        seen.append([])
        for run in runs:
            with held.reading(run) as history:
                seen[-1].append(history)
    assert [id(one) for one in seen[0]] == [id(one) for one in seen[1]]
    monkeypatch.setattr(histories, "FOLLOWED_S", -1.0)
    held.drop_unused()
    assert len(held) == histories.MAX_CACHED


def test_what_nobody_asks_for_is_forgotten(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Histories()
    with held.reading(run.run):
        monkeypatch.setattr(histories, "DROP_AFTER_S", -1.0)
        monkeypatch.setattr(histories, "FOLLOWED_S", -1.0)
        held.drop_unused()
        assert len(held) == 1  # it is being read
    held.drop_unused()
    assert len(held) == 0


def test_a_wait_for_another_reader_is_bounded(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "READ_S", 0.05)
    held = Histories()
    with held.reading(run.run), pytest.raises(Busy, match="tiny-1"), held.reading(run.run):
        pass
