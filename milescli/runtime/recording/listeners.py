"""Writes a run's events: `EventLog` and `MetricLog` write events.jsonl and metrics.jsonl;
`VerdictEmitter` reads these files, in a thread of its own, and judges whether the run is learning.
They never steer, stop or end a run. Trackers are in `tracking`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from milescli.checkpoint.run_dir import RunDir
from milescli.core.events import (
    AdapterEvent,
    Event,
    EventBus,
    Notice,
    RowStepDone,
    StepDone,
    VerdictGiven,
    stamped,
)
from milescli.core.scalars import scalars_of
from milescli.insight.case import Level, Verdict
from milescli.insight.facts import RunFacts, read_facts
from milescli.insight.memory import DeviceMemory, memory_of
from milescli.insight.reader import RunReader
from milescli.insight.verdict import read_verdict
from milescli.runtime.recording.side_files import LineFile, SideFiles

EVERY_S = 10.0
"""Shortest time in seconds between two reads of the files."""
SHARE = 0.02
"""Largest fraction of the time that is spent on reading."""
END_S = 10.0
"""Time limit in seconds of the last read, at the end of a run."""


class VerdictEmitter:
    """Judges during a run whether it is learning, and emits the verdict if it has changed. A
    listener of one attempt; an earlier listener writes the events file."""

    def __init__(self, run: RunDir, bus: EventBus) -> None:
        self._run, self._bus = run, bus
        self._reader = RunReader(run)
        self._facts: RunFacts | None = None
        self._thread: threading.Thread | None = None
        self._verdict: Verdict | None = None
        self._emitted: tuple[object, ...] | None = None
        self._headline: str | None = None
        self._due = 0.0
        self._fault: Exception | None = None
        self._is_fault_told = False

    def __call__(self, event: Event) -> None:
        """Emit the result of the last read; start another one after a step, if enough time has
        passed."""
        done = event.event if isinstance(event, AdapterEvent) else event
        if not isinstance(done, StepDone | RowStepDone):
            return
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._emit_verdict()
        if self._thread is None and self._fault is None and time.monotonic() >= self._due:
            self._begin()

    def conclude(self) -> None:
        """Judge the whole run, before its last event is emitted."""
        if self._thread is not None:
            self._thread.join(END_S)
            if self._thread.is_alive():
                return
        if self._fault is None:
            self._begin()
            assert self._thread is not None, "it was begun"
            self._thread.join(END_S)
        self._emit_verdict(is_last=True)

    def memory(self) -> list[DeviceMemory]:
        """Return the peak memory of each process or device, and the planned memory; empty if the
        run's files could not be read."""
        if self._facts is None:
            return []
        with suppress(OSError):
            return memory_of(self._run, self._reader.history, self._facts)
        return []

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._look, name="judge", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        began = time.monotonic()
        try:
            self._reader.update()
            if self._facts is None:
                self._facts = read_facts(self._run)
            self._verdict = read_verdict(self._run, self._reader.history, facts=self._facts)
        except Exception as error:  # a fault of ours must not end a run of weeks
            self._fault = error
        now = time.monotonic()
        self._due = now + max(EVERY_S, (now - began) / SHARE)

    def _emit_verdict(self, *, is_last: bool = False) -> None:
        """Emit the verdict if it has changed; at the end also if only its figures have."""
        fault, verdict = self._fault, self._verdict
        if fault is not None and not self._is_fault_told:
            self._is_fault_told = True
            text = f"there is no verdict from now on: {type(fault).__name__}: {fault}"
            self._bus.emit(Notice(text=text, level="warning"))
        if fault is not None or verdict is None:
            return
        worse = [one for one in verdict.findings if one.level is not Level.HINT]
        summary = (verdict.is_learning, *(one.name for one in worse))
        is_stale = is_last and self._headline not in (None, verdict.headline)
        if (summary == self._emitted and not is_stale) or (
            self._emitted is None and verdict.is_learning is None and not worse
        ):
            return
        self._emitted, self._headline = summary, verdict.headline
        self._bus.emit(
            VerdictGiven(
                step=verdict.step,
                headline=verdict.headline,
                is_learning=verdict.is_learning,
                findings={one.name: f"{one.title}: {one.evidence}" for one in worse},
            )
        )


class EventLog:
    """Writes events.jsonl: every event as one JSON object a line."""

    def __init__(self, file: Path) -> None:
        self._file = LineFile(file)

    def __call__(self, event: Event) -> None:
        """Write one line."""
        self._file.write(json.dumps(stamped(event)))


class MetricLog:
    """Writes metrics.jsonl: the scalars of each step under flat names."""

    def __init__(self, file: Path) -> None:
        self._file = LineFile(file)

    def __call__(self, event: Event) -> None:
        """Write one line for an event that carries scalars."""
        if (scalars := scalars_of(event)) is not None:
            step, values = scalars
            self._file.write(json.dumps({"step": step, **values}))


def attach_run_files(bus: EventBus, run: RunDir, *, has_scalars: bool = True) -> None:
    """Add listeners that write the run's files; warn once if they cannot be written. `has_scalars`:
    False for a run whose adapters have the scalars."""
    side = SideFiles(bus)

    def listen(listener: Callable[[Event], None], path: Path) -> None:
        def guarded(event: Event) -> None:
            with side.writing(path):
                listener(event)

        bus.listeners.append(guarded)

    listen(EventLog(run.events_file), run.events_file)
    if has_scalars:
        listen(MetricLog(run.metrics_file), run.metrics_file)
