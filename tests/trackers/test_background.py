"""A tracker that fails, hangs or is slow holds nobody up, and is told of once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from milescli.core.events import to_record
from milescli.trackers.background import BackgroundTracker
from tests.fake_run import step_done

BOUND_S = 120.0
"""On every wait of this file."""


class Kept:
    """A tracker that keeps what it is told; before each call it does `first`."""

    def __init__(self, first: Callable[[], object] = lambda: None) -> None:
        self.first = first
        self.steps: list[int] = []
        self.outcome = ""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.first()
        self.steps.append(step)

    def event(self, record: Mapping[str, Any]) -> None:
        assert time.time() - record["unix_s"] < BOUND_S

    def close(self, outcome: str) -> None:
        self.outcome = outcome


def tell(tracker: BackgroundTracker, *steps: int) -> None:
    for step in steps:
        tracker.put(to_record(step_done(step, 9, reward=0.5)))


def test_it_is_told_all_in_order_and_then_the_end() -> None:
    kept = Kept()
    tracker = BackgroundTracker("mine", lambda: kept)
    tell(tracker, 1, 2, 3)
    tracker.close("stopped")
    tracker.close("done")  # only the first counts
    tell(tracker, 4)
    assert tracker.wait(BOUND_S)
    assert (kept.steps, kept.outcome, tracker.take_messages()) == ([1, 2, 3], "stopped", [])


def refuse() -> None:
    raise ConnectionError("no route to the server; key 0123456789abcdef")


@pytest.mark.parametrize("leave", [refuse, lambda: exit(3)], ids=["raises", "leaves"])
def test_one_that_fails_is_told_of_once_and_tried_again(leave: Callable[[], None]) -> None:
    is_down = [True, True, False]

    def first() -> None:
        if is_down.pop(0):
            leave()

    kept = Kept(first)
    tracker = BackgroundTracker("mine", lambda: kept)
    tell(tracker, 1, 2, 3)
    tracker.close("done")
    assert tracker.wait(BOUND_S)
    assert kept.steps == [3] and kept.outcome == "done" and tracker.num_lost == 2
    [said] = tracker.take_messages()
    assert "tracker mine cannot be told of a step" in said and "The run goes on" in said
    assert tracker.take_messages() == []


def test_what_it_raises_does_not_say_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_KEY", "0123456789abcdef")
    tracker = BackgroundTracker("mine", lambda: refuse())  # type: ignore[func-returns-value]
    tell(tracker, 1)
    tracker.close("done")
    assert tracker.wait(BOUND_S) and tracker.num_lost == 1
    [said] = tracker.take_messages()
    assert "cannot be begun (ConnectionError: no route to the server; key $SOME_SERV" in said


def test_a_queue_that_is_full_takes_no_more_and_nobody_waits() -> None:
    server = threading.Event()
    kept = Kept(lambda: server.wait(BOUND_S))
    tracker = BackgroundTracker("mine", lambda: kept, max_waiting=5)
    tell(tracker, *range(1, 10))
    lost = tracker.num_lost
    assert lost >= 3  # the first is in its hands
    [said] = tracker.take_messages()
    assert "mine has 5 records to take in and is too slow for more" in said
    tracker.close("done")
    assert not tracker.wait(0.05) and tracker.num_waiting
    server.set()
    assert tracker.wait(BOUND_S)
    assert len(kept.steps) == 9 - lost and kept.outcome == "done"
