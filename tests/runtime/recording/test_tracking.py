"""Who is told of a run, and what becomes of trackers that fail: the run never does."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import MachineError
from milescli.core.events import AdapterEvent, EventBus, Notice, PhaseStarted, RunEnded, WorkerLost
from milescli.platform.ports import free_ports
from milescli.recipe.machine import RunSettings
from milescli.recipe.schema import Recipe
from milescli.runtime.recording import tracking
from milescli.runtime.recording.tracking import require_tracking, tracked_run, tracking_run
from milescli.runtime.spec import RunSpec
from milescli.trackers.base import TrackedRun
from tests.fake_run import step_done
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)
TOLD: dict[str, list[Any]] = {}
"""By the run's id: what its tracker was told."""
HELD = threading.Event()


class Kept:
    """A plug-in: keeps what it is told."""

    def __init__(self, *, run: TrackedRun) -> None:
        self.told = TOLD.setdefault(run.id, [])

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.told.append((step, scalars["rollout/reward_mean"]))

    def event(self, record: Mapping[str, Any]) -> None:
        self.told.append(record["event"])

    def close(self, outcome: str) -> None:
        self.told.append(outcome)


class Dead(Kept):
    """One whose server is gone."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        raise ConnectionRefusedError("nobody is there")


class Hanging(Kept):
    """One whose server says nothing at the end."""

    def close(self, outcome: str) -> None:
        HELD.wait(600)


@dataclass
class Spec:
    """What of a RunSpec trackers are made of."""

    run: RunDir
    recipe: Recipe
    first_step: int = 0
    adapters: Mapping[str, Spec] = field(default_factory=dict)


def spec_of(folder: Path, *trackers: str, adapters: tuple[str, ...] = (), **run: Any) -> RunSpec:
    """Of a run in this folder that names trackers of this file."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{__name__}:{name}" for name in trackers]
    recipe = Recipe(run=RunSettings(trackers=names, **run))
    own = {name: spec_of(folder / "adapters" / name, *trackers) for name in adapters}
    return cast(RunSpec, Spec(run=RunDir(folder), recipe=recipe, adapters=cast(Any, own)))


@dataclass
class Said:
    """Listens, and is the screen."""

    events: list[Any] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def note(self, text: str) -> None:
        self.warnings.append(text)

    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Notice)]


def tell(spec: RunSpec, *events: Any) -> Said:
    """What the user sees of a run of these events."""
    said = Said()
    bus = EventBus([said.events.append])
    with tracking_run(spec, bus=bus, output=cast(Output, said)):
        for event in events:
            bus.emit(event)
    return said


END = RunEnded(outcome="done", step=1, seconds=1.0)


def test_a_tracker_of_the_users_is_told_everything_in_order(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "sums", "Kept")
    said = tell(spec, PhaseStarted(phase="train"), step_done(1, 4, reward=0.5), END)
    run_id = spec.run.tracking_id()
    assert TOLD[run_id] == ["PhaseStarted", (1, 0.5), "StepDone", "RunEnded", "done"]
    assert not said.notices() and not said.warnings
    again = tracked_run(spec)
    assert again.id == run_id and run_id.startswith("sums-")
    assert again.recipe["run.project"] == "miles"


def test_each_adapter_has_its_own_and_hears_of_the_whole_run(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "both", "Kept", adapters=("sums", "words"))
    lost = WorkerLost(worker="engine 0", what="", why="", step=0, restart=1)
    of_sums = [step_done(1, 4, reward=0.25), END]
    tell(spec, lost, *(AdapterEvent(adapter="sums", event=event) for event in of_sums), END)
    sums, words = (spec.adapters[name].run.tracking_id() for name in ("sums", "words"))
    assert sums.startswith("both-sums-")
    assert TOLD[sums] == ["WorkerLost", (1, 0.25), "StepDone", "RunEnded", "done"]
    assert TOLD[words] == ["WorkerLost", "RunEnded", "done"]


def test_one_whose_server_is_gone_is_told_of_once_and_the_run_goes_on(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "sums", "Dead")
    said = tell(spec, *(step_done(step, 9, reward=0.5) for step in range(1, 9)), END)
    [warning] = said.notices() + said.warnings
    assert "Dead cannot be told of a step (ConnectionRefusedError: nobody is there)" in warning
    assert TOLD[spec.run.tracking_id()][-1] == "done"
    assert isinstance(said.events[-1], RunEnded), "nothing comes after the end of a run"


def test_what_goes_wrong_at_the_end_is_said_after_it_and_is_no_event(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "sums", "Dead")
    said = Said()
    bus = EventBus([said.events.append])
    with tracking_run(spec, bus=bus, output=cast(Output, said)) as tracking:
        bus.emit(step_done(1, 9, reward=0.5))
        [tracker] = tracking.trackers
        until(lambda: tracker.num_lost)
        bus.emit(END)
    assert [type(event).__name__ for event in said.events] == ["StepDone", "RunEnded"]
    [warning] = said.warnings
    assert "nobody is there" in warning


def test_one_that_hangs_at_the_end_is_waited_for_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_S", 0.2)
    try:
        said = tell(spec_of(tmp_path / "sums", "Hanging"), END)
    finally:
        HELD.set()
    note, warning = said.warnings
    assert "waiting at most 0.2 s for" in note and "Hanging" in note
    assert "Hanging had not finished 0.2 s after the run" in warning


def test_prometheus_sees_the_run_and_its_memory_while_it_goes_on(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "sums", metrics_address=f"127.0.0.1:{free_ports(1)[0]}")
    attempt = spec.run.new_attempt()
    line = '{"time": 1.0, "resident_bytes": {"7": 4096}, "names": {"7": "driver"}}\n'
    (attempt / "memory.jsonl").write_text(line)
    said = Said()
    bus = EventBus([said.events.append])
    with tracking_run(spec, bus=bus, output=cast(Output, said)):
        bus.emit(step_done(3, 4, reward=0.5))
        url = said.notices()[0].removeprefix("metrics are served at ")
        with urllib.request.urlopen(url, timeout=120) as reply:
            text = reply.read().decode()
        settings = RunSettings(trackers=[], metrics_address=url.split("/")[2])
        with pytest.raises(MachineError, match="cannot listen"):
            require_tracking(settings)
    assert 'miles_run_info{run="sums"' in text and "miles_step 3.0" in text
    assert 'miles_process_resident_bytes{process="driver"} 4096.0' in text
    require_tracking(settings)  # it is free again
