"""Holds histories of runs, read once for all requests and kept up to date; drops those that nobody
requests for a long time. Called from threads."""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from milescli.checkpoint.run_dir import RunDir
from milescli.core.history import History
from milescli.insight.reader import RunReader
from milescli.web.responses import Busy, Forbidden

MAX_CACHED = 16
"""Number of histories in memory besides those that a page follows; the least recently used one is
dropped first."""
FOLLOWED_S = 10.0
"""Seconds since the last request within which a page is assumed to follow the run."""
DROP_AFTER_S = 600.0
"""Seconds without a request after which a history is dropped."""
READ_S = 60.0
"""Longest time in seconds that a request waits while another one reads the same run."""


@dataclass(slots=True)
class _CachedHistory:
    reader: RunReader
    lock: threading.Lock = field(default_factory=threading.Lock)
    last_request_s: float = 0.0

    def stays_cached(self, place: int) -> bool:
        """Return True if the history stays in memory; `place` 0 is the most recently used."""
        age_s = time.monotonic() - self.last_request_s
        is_new = age_s < DROP_AFTER_S if place < MAX_CACHED else age_s < FOLLOWED_S
        return self.lock.locked() or is_new


class Histories:
    """Holds the histories of all runs of a server."""

    def __init__(self) -> None:
        self._cached = dict[str, _CachedHistory]()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._cached)

    @contextmanager
    def reading(self, run: RunDir) -> Iterator[History]:
        """Provide the history with everything new; no other thread reads or changes it within the
        context. Raises Forbidden if this user may not read the events, Busy if another request
        reads for too long."""
        cached = self._of(run)
        if not cached.lock.acquire(timeout=READ_S):
            raise Busy(
                f"run `{run.name}` was not read within {READ_S:g} s",
                why="another request reads its events, and has not ended",
                fix=f"ls -l {shlex.quote(str(run.events_file))}   # is it huge, or its disk away?",
            )
        try:
            require_readable(run)
            cached.reader.update()
            cached.last_request_s = time.monotonic()
            yield cached.reader.history
        finally:
            cached.lock.release()

    def drop_unused(self) -> None:
        """Drop histories that nobody has requested for a while."""
        with self._lock:
            newest = sorted(self._cached.items(), key=lambda item: -item[1].last_request_s)
            self._cached = {
                path: cached
                for place, (path, cached) in enumerate(newest)
                if cached.stays_cached(place)
            }

    def _of(self, run: RunDir) -> _CachedHistory:
        self.drop_unused()
        with self._lock:
            cached = self._cached.get(str(run.path))
            if cached is None:
                cached = self._cached[str(run.path)] = _CachedHistory(RunReader(run))
            cached.last_request_s = time.monotonic()
            return cached


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
            fix=f"ls -l {shlex.quote(str(run.events_file))}   # check its owner; your user "
            f"id is {os.getuid()}",
        ) from None
