"""How many samples are being made, over time: whether rollout was held back. Asked by the collector
once a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from milescli.core.events import FlowStats


class FlowMeter:
    """Belongs to one event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._num_running = 0
        self._began = self._last = clock()
        self._idle_s = self._sample_s = 0.0

    @contextmanager
    def sample(self) -> Iterator[None]:
        """One is being made."""
        self._advance()
        self._num_running += 1
        try:
            yield
        finally:
            self._advance()
            self._num_running -= 1

    def read(self) -> FlowStats:
        """Since it was read before."""
        self._advance()
        seconds = self._last - self._began
        stats = FlowStats(
            idle_s=self._idle_s, running_mean=self._sample_s / seconds if seconds > 0 else 0.0
        )
        self._began, self._idle_s, self._sample_s = self._last, 0.0, 0.0
        return stats

    def _advance(self) -> None:
        now = self._clock()
        self._sample_s += self._num_running * (now - self._last)
        if not self._num_running:
            self._idle_s += now - self._last
        self._last = now
