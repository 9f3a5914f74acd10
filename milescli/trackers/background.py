"""Runs a tracker in a thread of its own, which gets records through a bounded queue: a slow or dead
server delays nobody. Called by `runtime.tracking` in the driver's thread."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from milescli.core.private import without_secret_values
from milescli.core.scalars import Record, scalars_in
from milescli.trackers.base import Tracker

MAX_WAITING = 1000
"""Records that wait for a tracker; further ones are dropped."""


class BackgroundTracker:
    """Runs one tracker of one run in a thread. Problems are stored until `take_messages` is
    called."""

    def __init__(
        self, name: str, begin: Callable[[], Tracker], *, max_waiting: int = MAX_WAITING
    ) -> None:
        """Start the thread. `begin`: creates the tracker; called in the thread, as a server may be
        slow to answer."""
        self.name = name
        self.num_lost = 0
        """Records that it was not told of."""
        self._begin, self._max_waiting = begin, max_waiting
        self._waiting: queue.SimpleQueue[Record | str] = queue.SimpleQueue()
        """Records; a text is the outcome, and the last."""
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._has_failed = self._is_closed = False
        self._thread = threading.Thread(target=self._live, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Pass on a record, without waiting."""
        if self._is_closed:
            return
        if self._waiting.qsize() >= self._max_waiting:
            if not self.num_lost:
                self._news.put(
                    f"{self.name} has {self._max_waiting} records to take in and is too slow for "
                    "more; some are left out there. The run goes on"
                )
            self.num_lost += 1
            return
        self._waiting.put({**record, "unix_s": time.time()})

    def close(self, outcome: str) -> None:
        """Pass on the outcome, after which nothing follows, without waiting. Later calls do
        nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._waiting.put(outcome)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`. Return True if the tracker has processed all records and is
        closed."""
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    def take_messages(self) -> list[str]:
        """Return new messages for the user; usually none."""
        messages = []
        while True:
            try:
                messages.append(self._news.get_nowait())
            except queue.Empty:
                return messages

    @property
    def num_waiting(self) -> int:
        """Return the number of records that the tracker has not taken yet."""
        return self._waiting.qsize()

    def _live(self) -> None:
        tracker: Tracker | None = None
        try:
            tracker = self._begin()
        except (Exception, SystemExit) as error:  # libraries of others raise what they like
            self._record_failure("cannot be begun", error)
        while not isinstance(record := self._waiting.get(), str):
            if tracker is None:
                self.num_lost += 1
                continue
            self._try("cannot be told of a step", lambda t=tracker, r=record: _pass_record(t, r))
        if tracker is not None:
            self._try("cannot be closed", lambda: tracker.close(record))

    def _try(self, what: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:
            self.num_lost += 1
            self._record_failure(what, error)

    def _record_failure(self, what: str, error: BaseException) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        message = without_secret_values(" ".join(str(error).split())[:300], os.environ)
        self._news.put(
            f"tracker {self.name} {what} ({type(error).__name__}: {message}). The run goes on "
            "without what is missing there; events.jsonl and metrics.jsonl have it all"
        )


def _pass_record(tracker: Tracker, record: Record) -> None:
    if (scalars := scalars_in(record)) is not None:
        tracker.log(*scalars)
    tracker.event(record)
