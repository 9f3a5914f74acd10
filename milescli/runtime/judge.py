"""Says while a run goes on whether it is learning: the verdict over all that it has written, in a
thread of its own, told as an event where it has changed. Observes; never steers, stops or ends a
run."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from milescli.checkpoint.run_dir import RunDir
from milescli.core.events import (
    Event,
    EventBus,
    Notice,
    OfAdapter,
    RowStepDone,
    StepDone,
    VerdictGiven,
)
from milescli.insight.case import Level, Verdict
from milescli.insight.facts import RunFacts, read_facts
from milescli.insight.memory import DeviceMemory, memory_of
from milescli.insight.reader import RunReader
from milescli.insight.verdict import read_verdict

EVERY_S = 10.0
"""Between two looks, at least."""
SHARE = 0.02
"""Of the time that may be spent on looking."""
END_S = 10.0
"""Bound on the last look, at the end of a run."""


class Judge:
    """A listener of one attempt. The events file is written by a listener before it."""

    def __init__(self, run: RunDir, bus: EventBus) -> None:
        self._run, self._bus = run, bus
        self._reader = RunReader(run)
        self._facts: RunFacts | None = None
        self._thread: threading.Thread | None = None
        self._verdict: Verdict | None = None
        self._told: tuple[object, ...] | None = None
        self._due = 0.0
        self._fault: Exception | None = None
        self._is_fault_told = False

    def __call__(self, event: Event) -> None:
        """Tell what was found; look again after a step, where it is time."""
        done = event.event if isinstance(event, OfAdapter) else event
        if not isinstance(done, StepDone | RowStepDone):
            return
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._tell()
        if self._thread is None and self._fault is None and time.monotonic() >= self._due:
            self._begin()

    def conclude(self) -> None:
        """The verdict over the whole run, before its last event is told."""
        if self._thread is not None:
            self._thread.join(END_S)
            if self._thread.is_alive():
                return
        if self._fault is None:
            self._begin()
            assert self._thread is not None, "it was begun"
            self._thread.join(END_S)
        self._tell()

    def memory(self) -> list[DeviceMemory]:
        """What processes or devices held at most, beside what the plan said; empty where what the
        run wrote could not be read."""
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

    def _tell(self) -> None:
        fault, verdict = self._fault, self._verdict
        if fault is not None and not self._is_fault_told:
            self._is_fault_told = True
            text = f"no verdict from here on: {type(fault).__name__}: {fault}"
            self._bus.emit(Notice(text=text, level="warning"))
        if fault is not None or verdict is None:
            return
        worse = [one for one in verdict.findings if one.level is not Level.HINT]
        told = (verdict.is_learning, *(one.name for one in worse))
        if told == self._told or (self._told is None and verdict.is_learning is None and not worse):
            return
        self._told = told
        self._bus.emit(
            VerdictGiven(
                step=verdict.step,
                headline=verdict.headline,
                is_learning=verdict.is_learning,
                findings={one.name: f"{one.title}: {one.evidence}" for one in worse},
            )
        )
