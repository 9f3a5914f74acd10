"""What workers hold is told when it is new or has changed."""

from __future__ import annotations

from milescli.core.events import Event, EventBus, MemorySeen, WorkerMemory
from milescli.runtime.loop import MemoryReports


def rank(number: int, size: int) -> WorkerMemory:
    return WorkerMemory(worker=f"trainer rank {number}", device="cuda:0", peak_bytes=size)


def test_only_what_has_changed_is_told() -> None:
    told, news = list[Event](), MemoryReports()
    bus = EventBus(listeners=[told.append])
    for step, sizes in enumerate(((1000, 1000), (1010, 1000), (1030, 1000), (1030, 900)), start=1):
        workers = tuple(rank(number, size) for number, size in enumerate(sizes))
        news.report(bus, step=step, workers=workers)
    assert told == [
        MemorySeen(step=1, workers=(rank(0, 1000), rank(1, 1000))),
        MemorySeen(step=3, workers=(rank(0, 1030),)),
        MemorySeen(step=4, workers=(rank(1, 900),)),
    ]
