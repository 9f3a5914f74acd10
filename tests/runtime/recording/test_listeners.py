"""The verdict is told while a run goes on, where it changes, and a fault of it ends nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.events import Event, EventBus, Notice, RunEnded, VerdictGiven
from milescli.runtime.recording.listeners import EventLog, VerdictEmitter
from tests.insight.planted import Planted, line


def listened(run: RunDir, planted: Planted) -> Iterator[Event]:
    """All that is told of a run whose events are these; the verdict at its end included."""
    bus, told = EventBus(), list[Event]()
    judge = VerdictEmitter(run, bus)
    bus.listeners += [EventLog(run.events_file), judge, told.append]
    for _, event in planted.events():
        if isinstance(event, RunEnded):
            judge.conclude()
        bus.emit(event)
    return iter(told)


def test_the_verdict_is_told_before_the_end_and_written_down(tmp_path: Path) -> None:
    flat = {"reward": (line(0.3, 0.3), 0.03), "accuracy": (line(0.3, 0.3), 0.0)}
    run = RunDir(tmp_path)
    told = list(listened(run, Planted(courses=flat)))
    given = [event for event in told if isinstance(event, VerdictGiven)]
    assert given[-1].is_learning is False
    assert list(given[-1].findings) == ["reward-flat"]
    assert isinstance(told[-1], RunEnded)
    kept = [json.loads(text) for text in run.events_file.read_text().splitlines()]
    assert [one["headline"] for one in kept if one["event"] == "VerdictGiven"] == [
        one.headline for one in given
    ]


def test_what_has_not_changed_is_not_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("milescli.runtime.recording.listeners.EVERY_S", 0.0)
    monkeypatch.setattr("milescli.runtime.recording.listeners.SHARE", 1e9)
    told = listened(RunDir(tmp_path), Planted(steps=200))
    given = [event for event in told if isinstance(event, VerdictGiven)]
    assert 1 <= len(given) <= 4
    assert len({(one.is_learning, *one.findings) for one in given[:-1]}) == len(given[:-1])
    assert "over 200 steps" in given[-1].headline, "the last verdict has the last figures"


def test_a_fault_of_the_verdict_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr("milescli.runtime.recording.listeners.read_verdict", broken)
    told = list(listened(RunDir(tmp_path), Planted()))
    notices = [event for event in told if isinstance(event, Notice)]
    assert len(notices) == 1 and "a fault of ours" in notices[0].text
    assert isinstance(told[-1], RunEnded)
