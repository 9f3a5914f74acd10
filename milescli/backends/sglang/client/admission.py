"""Limits the requests that an engine has at once: those that it can run, and a few that wait there,
so that it never idles; fewer while its KV cache is full. Requests that are held back go to the
first engine that can take more. Order and seeds of samples do not depend on it. Pure; `batching`
calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REFILL = 8
"""Held-back requests are sent once an engine can take this many: each call costs its server a
millisecond."""
QUEUE_SHARE = 8
"""Requests that may wait at an engine: one for every QUEUE_SHARE that it can run, and at least
`REFILL`."""
HIGH_USAGE, LOW_USAGE = 0.95, 0.85
"""Shares of the KV cache in use. From the first on, an engine gets no request that it could not run
at once; below the second, it gets more."""
MIN_OPEN = 2
"""Fewest requests that an engine gets: one that runs, and the next."""
RETRACTION_SHARE = 0.9
"""Share of the running requests that may remain after the engine had to discard the cache of
some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Describes the current load of an engine, over its data-parallel ranks."""

    running: int
    waiting: int
    """Requests that it has not started, or has started and discarded."""
    usage: float
    """Share of the KV cache that is in use, on its fullest rank."""

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
    """The bound, at most `max_open`."""
    num_retractions: int = 0
    """Times that it discarded the cache of a running request since the last check."""

    def __post_init__(self) -> None:
        self.limit = self.max_open

    @property
    def queue(self) -> int:
        """Return the number of requests that may wait there."""
        return max(REFILL, (self.max_running or 0) // QUEUE_SHARE)

    @property
    def max_open(self) -> int:
        """Return the bound that applies while the engine's cache is not full."""
        return (self.max_running or 0) + self.queue

    def num_spare(self, num_open: int) -> int:
        """Return how many more requests the engine may get."""
        return max(0, self.limit - num_open) if self.max_running is not None else 2**30

    def adapt(self, load: Load) -> None:
        """Adapt the bound to the engine's load."""
        if self.max_running is None:
            return
        retracted, self.num_retractions = self.num_retractions, 0
        if retracted:
            self.limit = max(MIN_OPEN, min(self.limit, int(RETRACTION_SHARE * load.running)))
        elif load.usage >= HIGH_USAGE:
            self.limit = max(MIN_OPEN, min(self.limit, load.running))
        elif load.waiting > self.queue:  # its cache holds fewer than it has slots for
            self.limit = max(MIN_OPEN, min(self.limit, load.running + self.queue))
        elif load.usage < LOW_USAGE and load.waiting <= self.queue // 2:
            self.limit = min(self.max_open, self.limit + max(MIN_OPEN, self.limit // 4))
