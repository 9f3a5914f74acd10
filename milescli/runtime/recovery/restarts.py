"""Limits how often dead processes are restarted, and reports restarts as events."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from milescli.core.errors import MilesError, WorkerKilled
from milescli.core.events import EventBus, WorkerLost, WorkerReplaced
from milescli.recipe.machine import Fault

E = TypeVar("E", bound=MilesError)
T = TypeVar("T")

SAME_STEP_LIMIT = 3
"""Number of deaths of one process at one step after which the run ends: the step itself kills
it."""


@dataclass(slots=True, kw_only=True)
class Restarts:
    """Counts restarts, and decides whether another one is allowed."""

    limits: Fault
    unit: str = "step"
    """Unit of a process's progress, for messages: a step, or a request."""
    total: int = 0
    _times: deque[float] = field(default_factory=deque)
    _at_step: Counter[tuple[str, int]] = field(default_factory=Counter)

    def refusal(self, worker: str, step: int) -> str | None:
        """Count a restart and return None; or return why none is allowed."""
        now = time.monotonic()
        while self._times and self._times[0] < now - self.limits.window_s:
            self._times.popleft()
        self._at_step[worker, step] += 1
        if self._at_step[worker, step] >= SAME_STEP_LIMIT:
            return f"it died {SAME_STEP_LIMIT} times at {self.unit} {step + 1}"
        if len(self._times) >= self.limits.max_restarts:
            return (
                f"{len(self._times)} restarts happened within {self.limits.window_s:g} s, and "
                f"fault.max_restarts is {self.limits.max_restarts}"
            )
        self._times.append(now)
        self.total += 1
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs:
    """Holds what every keeper of a run needs to replace dead processes."""

    bus: EventBus
    restarts: Restarts
    step: Callable[[], int] = lambda: 0
    """Returns the number of completed steps."""

    def begin(self, worker: str, error: MilesError) -> str | None:
        """Count a restart, report the loss and return None; or return why no restart is allowed."""
        step = self.step()
        if refusal := self.restarts.refusal(worker, step):
            return refusal
        self.bus.emit(
            WorkerLost(
                worker=worker,
                what=error.what,
                why=error.why,
                step=step,
                restart=self.restarts.total,
            )
        )
        return None

    def done(self, worker: str, *, began: float, source: str = "", lost_samples: int = 0) -> None:
        """Report that a replacement runs. `began`: when the loss was noticed, by time.monotonic;
        `source`: where its state came from; `lost_samples`: see `WorkerReplaced`."""
        self.bus.emit(
            WorkerReplaced(
                worker=worker,
                step=self.step(),
                seconds=time.monotonic() - began,
                source=source,
                lost_samples=lost_samples,
            )
        )


def with_refusal(error: E, refusal: str) -> E:
    """Return the error that ends the run because no restart is allowed."""
    return type(error)(error.what, why=f"{error.why}\n{refusal}", fix=error.fixes)


async def retry_start(worker: str, start: Callable[[], Awaitable[T]], *, repairs: Repairs) -> T:
    """Return the result of `start`; call it again if a process is killed while it starts. Raises
    WorkerKilled if a limit is reached, and at once whatever else `start` raises, because that would
    happen again."""
    began: float | None = None
    while True:
        try:
            started = await start()
        except WorkerKilled as error:
            began = began or time.monotonic()
            if refusal := repairs.begin(worker, error):
                raise with_refusal(error, refusal) from None
        else:
            if began is not None:
                repairs.done(worker, began=began)
            return started
