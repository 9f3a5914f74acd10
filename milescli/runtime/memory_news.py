"""Memory of ranks, engines and devices, told when it has changed: hundreds of ranks say at each
step what they held, and a run has thousands of steps. Called by the loops."""

from __future__ import annotations

from dataclasses import dataclass, field

from milescli.core.events import EventBus, MemorySeen, WorkerMemory

CHANGED = 0.02
"""Share of what was told last that is news."""


@dataclass(slots=True)
class MemoryNews:
    """Of one run in memory."""

    told: dict[str, WorkerMemory] = field(default_factory=dict)
    """The last of each worker."""

    def tell(self, bus: EventBus, *, step: int, workers: tuple[WorkerMemory, ...]) -> None:
        """An event of those that are new, or hold another amount than was told; none: nothing."""
        news = tuple(one for one in workers if _differs(one, self.told.get(one.worker)))
        if news:
            self.told |= {one.worker: one for one in news}
            bus.emit(MemorySeen(step=step, workers=news))


def _differs(now: WorkerMemory, before: WorkerMemory | None) -> bool:
    if before is None or now.device != before.device:
        return True
    pairs = (
        (now.peak_bytes, before.peak_bytes),
        (now.reserved_bytes or 0, before.reserved_bytes or 0),
        (now.used_bytes or 0, before.used_bytes or 0),
    )
    return any(abs(one - other) > CHANGED * other for one, other in pairs)
