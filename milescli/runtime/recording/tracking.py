"""Reports a run outside of its folder: to the trackers of `run.trackers`, each in a thread, and to
Prometheus at `run.metrics_address`. They never steer, delay or end a run. `train` uses it;
`require_tracking` refuses bad settings before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import milescli
from milescli.console.output import Output
from milescli.core.events import Event, EventBus, Notice, RunEnded, stamped
from milescli.core.files import last_records
from milescli.platform import memory_record
from milescli.recipe.load import values_of
from milescli.recipe.machine import RunSettings, metrics_address
from milescli.runtime.spec import RunSpec
from milescli.trackers.background import BackgroundTracker
from milescli.trackers.base import TrackedRun, load_trackers
from milescli.trackers.prometheus import Exposition, MetricsServer, require_free

CLOSE_S = 20.0
"""Seconds for all trackers to receive the remaining events after the run has ended."""
_UNREPORTED_WAIT_S = 1.0
"""Shorter waits, in seconds, are not reported."""
FAILED = "failed"


def require_tracking(settings: RunSettings) -> None:
    """Check the trackers before anything starts. Raises RecipeError if a tracker cannot be loaded,
    MachineError if the address cannot be used."""
    load_trackers(settings)
    if (address := metrics_address(settings)) is not None:
        require_free(*address)


@contextmanager
def tracking_run(spec: RunSpec, *, bus: EventBus, output: Output) -> Iterator[Tracking]:
    """Pass the events that the bus emits within the context to trackers and Prometheus. Raises as
    `require_tracking`."""
    with _metrics(spec, bus=bus, output=output):
        tracking = Tracking(spec, bus=bus, output=output)
        bus.listeners.append(tracking)
        try:
            yield tracking
        finally:
            tracking.close()
            for text in tracking.missing:
                output.warn(text)


class Tracking:
    """Sends events to the run's trackers. A listener. Each of several adapters has trackers of its
    own, which also get the events of the whole run. They are closed on the way out, while the
    session of the run is open: the helpers of some count as processes of the run, and end with
    it."""

    def __init__(self, spec: RunSpec, *, bus: EventBus, output: Output) -> None:
        self._bus, self._output = bus, output
        self.missing: list[str] = []
        """What the user should know when the run has ended."""
        factories = load_trackers(spec.recipe.run)
        specs = (spec.adapters or {None: spec}) if factories else {}
        runs = {name: tracked_run(one) for name, one in specs.items()}
        self._by_adapter: Mapping[str | None, list[BackgroundTracker]] = {
            who: [
                BackgroundTracker(name, partial(factory, run=run))
                for name, factory in factories.items()
            ]
            for who, run in runs.items()
        }
        self.trackers = [one for some in self._by_adapter.values() for one in some]

    def __call__(self, event: Event) -> None:
        """Pass an event on; warn of errors with earlier ones."""
        if not self.trackers:
            return
        record = stamped(event)
        who = record.get("adapter")
        trackers = self.trackers if who is None else self._by_adapter.get(str(who), [])
        is_end = record["event"] == RunEnded.__name__
        for tracker in trackers:
            tracker.put(record)
            if is_end:
                tracker.close(str(record["outcome"]))
        if is_end:
            return  # nothing comes after it: `close` says what is left to say
        for text in self._take_problems():
            self._bus.emit(Notice(text=text, level="warning"))

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all trackers, within the bound. Later calls do nothing."""
        deadline = time.monotonic() + CLOSE_S
        for tracker in self.trackers:
            tracker.close(FAILED)
        soon = time.monotonic() + _UNREPORTED_WAIT_S
        if slow := [one.name for one in self.trackers if not one.wait(soon - time.monotonic())]:
            who = ", ".join(dict.fromkeys(slow))
            self._output.note(f"waiting at most {CLOSE_S:g} s for {who} to store the rest")
        are_slow = [one for one in self.trackers if not one.wait(deadline - time.monotonic())]
        self.missing += self._take_problems() + [
            f"tracker {one.name} had not finished {CLOSE_S:g} s after the run: it lacks "
            f"{one.num_waiting} records; events.jsonl and metrics.jsonl contain them"
            for one in are_slow
        ]
        self.trackers = []

    def _take_problems(self) -> list[str]:
        """Return the problems since the last call, each once even if several adapters share it."""
        return list(dict.fromkeys(text for one in self.trackers for text in one.take_messages()))


def tracked_run(spec: RunSpec) -> TrackedRun:
    """Return what trackers know of the run."""
    run = spec.run
    return TrackedRun(
        name=run.full_name,
        id=run.tracking_id(),
        project=spec.recipe.run.project,
        folder=run.path,
        version=milescli.__version__,
        first_step=spec.first_step,
        recipe=values_of(spec.recipe),
    )


@contextmanager
def _metrics(spec: RunSpec, *, bus: EventBus, output: Output) -> Iterator[None]:
    address = metrics_address(spec.recipe.run)
    if address is None:
        yield
        return
    run = spec.run
    exposition = Exposition(run=run.name, version=milescli.__version__)

    def text() -> str:
        for record in last_records(run.path / "logs" / "latest" / memory_record.FILE):
            exposition.feed(record)
            break
        return exposition.text()

    server = MetricsServer(*address, text)
    try:
        bus.listeners.append(lambda event: exposition.feed(stamped(event)))
        output.note(message := f"metrics are served at {server.url}")
        bus.emit(Notice(text=message))
        yield
    finally:
        server.close()
