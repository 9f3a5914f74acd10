"""For how long a worker has not spoken, and when that is too long. A clock, no more: whoever
watches the worker sets it at each look, and acts."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from milescli.core.events import WorkerSilent

SHOWN_AFTER = 1 / 3
"""Of the bound, until the user is told."""
UNSURE = 2.0
"""Times the bound, for one that may be busy: the system lets it run, and it does not answer."""
_MAX_COUNTED_S = 15.0
"""Between two looks, at most: longer, and it was this process that did not look (Ctrl-Z)."""


@dataclass(slots=True, kw_only=True)
class Silence:
    """Of one worker."""

    worker: str
    """As errors call it: engine 1."""
    bound_s: float
    """`machine.silence_s`."""
    seconds: float = 0.0
    """It has not spoken, for how long."""
    longest_s: float = 0.0
    """The longest silence after which it spoke again: so long is nothing unusual."""
    reason: str = ""
    """What was seen of it instead."""
    _times: float = 1.0
    """The bound."""
    _is_shown: bool = False
    _looked: float = field(default_factory=lambda: monotonic())

    def look(self, reason: str | None, *, times: float = 1.0) -> None:
        """It was looked at. `reason`: why it seems to hang; None: it speaks. `times`: the bound
        that holds for this reason."""
        now = monotonic()
        if reason is None:
            self.longest_s = max(self.longest_s, self.seconds)
            self.seconds, self.reason, self._is_shown = 0.0, "", False
        else:
            self.seconds += min(now - self._looked, _MAX_COUNTED_S)
            self.reason = reason
        self._looked, self._times = now, times

    @property
    def limit_s(self) -> float:
        """Beyond it the worker counts as hung."""
        return self._times * self.bound_s + self.longest_s

    @property
    def is_too_long(self) -> bool:
        """It hangs."""
        return self.seconds >= self.limit_s

    def news(self, step: int) -> WorkerSilent | None:
        """The event of it, once, a while before it is too long. `step`: steps done."""
        if self._is_shown or self.seconds < SHOWN_AFTER * self.bound_s + self.longest_s:
            return None
        self._is_shown = True
        return WorkerSilent(
            worker=self.worker,
            why=self.reason,
            step=step,
            seconds=self.seconds,
            limit_s=self.limit_s,
        )
