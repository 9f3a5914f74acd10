"""How many requests an engine is sent at once: what it can run, and a few that wait there, so that
it never idles; fewer while its KV cache is full. What is held back goes to whichever engine has
room first. Order and seeds of samples do not depend on it. Pure; `batching` calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REFILL = 8
"""Held requests are sent when there is room for so many: each call costs the engine's server a
millisecond."""
QUEUE_SHARE = 8
"""Requests that may wait at an engine beside those that it runs: one for each so many of these, and
at least `REFILL`."""
FULL, ROOMY = 0.95, 0.85
"""Shares of the cache: from the first on, an engine is sent nothing that it would not run; below
the second, it is sent more."""
LEAST = 2
"""An engine gets at least this many: one that runs, and the next."""
SHRINK = 0.9
"""Of the running requests, the share that may stay when the engine had to discard the cache of
some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Describes what an engine does now, over its data-parallel ranks."""

    running: int
    waiting: int
    """Requests that it has not started, or has started and discarded."""
    usage: float
    """Share of the KV cache that is taken, of its fullest rank."""

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]]) -> Load:
        """Read the `loads` of SGLang's /v1/loads."""
        return cls(
            running=sum(int(rank["num_running_reqs"]) for rank in ranks),
            waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
            usage=max((float(rank["token_usage"]) for rank in ranks), default=0.0),
        )


@dataclass(slots=True)
class Admission:
    """Bounds the open requests of one engine."""

    max_running: int | None
    """Requests that it can run; None: there is no bound at all."""
    limit: int = 0
    """The bound, at most `most`."""
    num_retractions: int = 0
    """Times that it discarded the cache of a running request since the last check."""

    def __post_init__(self) -> None:
        self.limit = self.most

    @property
    def queue(self) -> int:
        """Return the requests that may wait there."""
        return max(REFILL, (self.max_running or 0) // QUEUE_SHARE)

    @property
    def most(self) -> int:
        """Return the bound while its cache has room."""
        return (self.max_running or 0) + self.queue

    def room(self, num_open: int) -> int:
        """Return how many requests more it may be sent."""
        return max(0, self.limit - num_open) if self.max_running is not None else 2**30

    def look(self, load: Load) -> None:
        """Adapt the bound to what the engine does."""
        if self.max_running is None:
            return
        retracted, self.num_retractions = self.num_retractions, 0
        if retracted:
            self.limit = max(LEAST, min(self.limit, int(SHRINK * load.running)))
        elif load.usage >= FULL:
            self.limit = max(LEAST, min(self.limit, load.running))
        elif load.waiting > self.queue:  # its cache holds fewer than it has slots for
            self.limit = max(LEAST, min(self.limit, load.running + self.queue))
        elif load.usage < ROOMY and load.waiting <= self.queue // 2:
            self.limit = min(self.most, self.limit + max(LEAST, self.limit // 4))
