"""Says how far a slow piece of work is, and nothing of a quick one. Used where files are read."""

from __future__ import annotations

import time
from collections.abc import Callable

SAY_AFTER_S = 2.0
SAY_EVERY_S = 10.0


class Waiting:
    """Call it now and then with how much is done."""

    def __init__(
        self,
        say: Callable[[str], None] | None,
        what: str,
        *,
        after_s: float = SAY_AFTER_S,
        every_s: float = SAY_EVERY_S,
    ) -> None:
        """`say` is given lines such as `reading train.jsonl: 1,200,000 rows`; `what`: what stands
        before the colon."""
        self._say = say
        self._what = what
        self._every_s = every_s
        self._next_s = time.monotonic() + after_s

    def __call__(self, num_done: int) -> None:
        """So many rows are done."""
        now = time.monotonic()
        if self._say is not None and now >= self._next_s:
            self._next_s = now + self._every_s
            self._say(f"{self._what}: {num_done:,} rows")
