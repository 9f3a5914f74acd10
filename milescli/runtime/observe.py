"""What a run writes of itself as it goes: events.jsonl and metrics.jsonl. Listeners only; they
never steer and never stop a run. Trackers are the business of `tracking`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from milescli.checkpoint.run_dir import RunDir
from milescli.core.events import Event, EventBus, stamped
from milescli.core.scalars import scalars_of
from milescli.runtime.side_files import LineFile, SideFiles


class EventLog:
    """events.jsonl: everything that happened, one JSON object a line."""

    def __init__(self, file: Path) -> None:
        self._file = LineFile(file)

    def __call__(self, event: Event) -> None:
        """Write one line."""
        self._file.write(json.dumps(stamped(event)))


class MetricLog:
    """metrics.jsonl: the scalars of each step under flat names."""

    def __init__(self, file: Path) -> None:
        self._file = LineFile(file)

    def __call__(self, event: Event) -> None:
        """Write one line for an event that carries scalars."""
        if (scalars := scalars_of(event)) is not None:
            step, values = scalars
            self._file.write(json.dumps({"step": step, **values}))


def attach(bus: EventBus, run: RunDir, *, has_scalars: bool = True) -> None:
    """Let the run's files listen; what they cannot write is told of once. `has_scalars`: else it is
    a run whose adapters have them."""
    side = SideFiles(bus)

    def listen(listener: Callable[[Event], None], path: Path) -> None:
        def guarded(event: Event) -> None:
            with side.writing(path):
                listener(event)

        bus.listeners.append(guarded)

    listen(EventLog(run.events_file), run.events_file)
    if has_scalars:
        listen(MetricLog(run.metrics_file), run.metrics_file)
