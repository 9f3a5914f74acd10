"""Histories of runs, read once for all requests and kept up to date; dropped when nobody asks for a
long time. Called from threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from milescli.checkpoint.run_dir import RunDir
from milescli.core.history import History
from milescli.insight.reader import RunReader
from milescli.web.responses import Busy, Forbidden

NUM_HELD = 16
"""Histories in memory besides those that a page follows; the least recently used one is dropped
first."""
FOLLOWED_S = 10.0
"""A page that follows a run asks at shorter intervals."""
FORGET_S = 600.0
"""Seconds without a request after which a history is dropped."""
READ_S = 60.0
"""Longest that a request waits while another one reads the same run."""


@dataclass(slots=True)
class _Held:
    reader: RunReader
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked_s: float = 0.0

    def is_kept(self, place: int) -> bool:
        """Return True if the history stays in memory; `place` 0 is the most recently used."""
        age_s = time.monotonic() - self.asked_s
        is_new = age_s < FORGET_S if place < NUM_HELD else age_s < FOLLOWED_S
        return self.lock.locked() or is_new


class Histories:
    """Histories of all runs of a server."""

    def __init__(self) -> None:
        self._held = dict[str, _Held]()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    @contextmanager
    def reading(self, run: RunDir) -> Iterator[History]:
        """Provide the history with everything new; no other thread reads or changes it within the
        context. Raises Forbidden if this user may not read the events, Busy if another request
        reads for too long."""
        held = self._of(run)
        if not held.lock.acquire(timeout=READ_S):
            raise Busy(
                f"run `{run.name}` was not read within {READ_S:g} s",
                why="another request reads its events, and has not ended",
                fix=f"ls -l {run.events_file}   # is it huge, or its disk away?",
            )
        try:
            require_readable(run)
            held.reader.update()
            held.asked_s = time.monotonic()
            yield held.reader.history
        finally:
            held.lock.release()

    def forget_unused(self) -> None:
        """Drop histories that nobody asked for."""
        with self._lock:
            newest = sorted(self._held.items(), key=lambda item: -item[1].asked_s)
            self._held = {
                path: held for place, (path, held) in enumerate(newest) if held.is_kept(place)
            }

    def _of(self, run: RunDir) -> _Held:
        self.forget_unused()
        with self._lock:
            held = self._held.get(str(run.path))
            if held is None:
                held = self._held[str(run.path)] = _Held(RunReader(run))
            held.asked_s = time.monotonic()
            return held


def require_readable(run: RunDir) -> None:
    """Raise Forbidden if the run has events that this user may not read."""
    try:
        with open(run.events_file, "rb"):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise Forbidden(
            f"the events of run `{run.name}` cannot be read",
            why=f"{type(error).__name__}: {error}",
            fix=f"ls -l {run.events_file}   # check its owner; your user id is {os.getuid()}",
        ) from None
