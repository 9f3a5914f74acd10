"""What of a run is an alert, and that no alert holds up or ends a run."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import MachineError, MilesError, RecipeError, WorkerDied
from milescli.core.events import (
    AdapterEvent,
    EvalDone,
    Event,
    EventBus,
    PhaseStarted,
    RunEnded,
    ValidationDone,
    VerdictGiven,
)
from milescli.recipe.alerts import describe_alerts
from milescli.recipe.machine import RunSettings
from milescli.runtime.inputs.quick_checks import require_alerts
from milescli.runtime.recording import alerting as room
from milescli.runtime.recording.alerting import (
    SilenceMeter,
    alert_of_death,
    alerting,
)
from milescli.runtime.recording.listeners import attach_run_files
from tests.fake_run import step_done
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)
KEEP = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"


@dataclass
class Said:
    """The screen."""

    lines: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        self.lines.append(text)

    note = warn


@dataclass
class Rig:
    """A run in a folder, whose alerts a command writes to a file."""

    run: RunDir
    file: Path
    bus: EventBus = field(default_factory=EventBus)
    said: Said = field(default_factory=Said)
    settings: RunSettings = field(default_factory=RunSettings)

    def alerts(self) -> list[dict[str, Any]]:
        """Those that were sent."""
        text = self.file.read_text() if self.file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def tell(self, *events: Event, error: BaseException | None = None) -> None:
        """An attempt of these events."""
        with alerting(self.run, self.settings, bus=self.bus, output=cast(Output, self.said)):
            for event in events:
                self.bus.emit(event)
            if error is not None:
                raise error

    def events(self) -> list[dict[str, Any]]:
        """What events.jsonl has."""
        return [json.loads(line) for line in self.run.events_file.read_text().splitlines()]


def rig_in(folder: Path, *on: str, to: str | None = None) -> Rig:
    run = RunDir(folder / "sums-1")
    run.path.mkdir()
    rig = Rig(run, folder / "alerts")
    command = to or f'{sys.executable} -c "{KEEP}" {rig.file}'
    moments = {"alerts_on": list(on)} if on else {}
    rig.settings = RunSettings(alerts=[command], **moments)  # type: ignore[arg-type]
    attach_run_files(rig.bus, run)
    return rig


def ended(outcome: str, **error: object) -> RunEnded:
    return RunEnded(outcome=outcome, step=3, seconds=61.0, error=error or None)


def test_the_end_of_a_run_tells_its_verdict(tmp_path: Path) -> None:
    rig = rig_in(tmp_path)
    verdict = VerdictGiven(step=3, headline="It is learning: reward 0.1 → 0.9.", is_learning=True)
    rig.tell(PhaseStarted(phase="train"), step_done(3, 3), verdict, ended("done"))
    [alert] = rig.alerts()
    assert (alert["alert"], alert["run"], alert["step"], alert["num_steps"]) == (
        "end",
        "sums-1",
        3,
        3,
    )
    line = "sums-1, end at step 3 of 3: It is learning: reward 0.1 → 0.9."
    assert alert["text"] == alert["content"] == line
    assert not rig.said.lines


def test_a_failure_tells_what_why_and_fix(tmp_path: Path) -> None:
    rig = rig_in(tmp_path)
    home = str(Path.home())
    rig.tell(
        ended("failed", error="engine 1 died", why=f"see {home}/x", fix=["miles resume sums-1"])
    )
    [alert] = rig.alerts()
    assert alert["text"] == "sums-1, failure at step 3: engine 1 died"
    assert (alert["why"], alert["fix"]) == ("see ~/x", "miles resume sums-1")


def test_an_attempt_that_fails_before_it_can_say_so_is_a_failure(tmp_path: Path) -> None:
    rig = rig_in(tmp_path)
    with pytest.raises(MachineError):
        rig.tell(
            error=MachineError("Ray does not start", why="no port is free", fix="miles doctor")
        )
    [alert] = rig.alerts()
    assert (alert["alert"], alert["why"]) == ("failure", "no port is free")


def test_a_driver_that_died_is_spoken_for(tmp_path: Path) -> None:
    rig = rig_in(tmp_path)
    rig.bus.emit(step_done(7, 9))
    error: MilesError = WorkerDied("the driver died", why="SIGKILL", fix="miles resume sums-1")
    output = cast(Output, rig.said)
    alert_of_death(rig.run, rig.settings, error, outcome="killed", output=output)
    [alert] = rig.alerts()
    assert alert["text"] == "sums-1, failure at step 7: the driver died"


def test_only_what_is_wanted_is_sent_and_a_diagnosis_once(tmp_path: Path) -> None:
    rig = rig_in(tmp_path, "stop", "entropy-collapse")
    sick = VerdictGiven(
        step=3,
        headline="It is not learning.",
        is_learning=False,
        findings={"entropy-collapse": "Entropy collapses: 0.9 → 0.1", "reward-flat": "flat"},
    )
    of_adapter = AdapterEvent(adapter="a", event=ended("stopped"))
    rig.tell(step_done(3, 9), sick, sick, of_adapter, ended("done"))
    [alert] = rig.alerts()
    assert (alert["alert"], alert["diagnosis"]) == ("entropy-collapse", "entropy-collapse")
    assert "Entropy collapses: 0.9 → 0.1" in alert["text"]
    rig.tell(ended("stopped", error="stopped after step 3, and saved"))
    assert rig.alerts()[-1]["text"].endswith("stop at step 3: stopped after step 3, and saved")


def test_an_alert_that_fails_is_an_event_and_a_warning_and_no_more(tmp_path: Path) -> None:
    rig = rig_in(tmp_path, "entropy-collapse", "end", to="false")
    sick = VerdictGiven(
        step=1, headline="", is_learning=None, findings={"entropy-collapse": "it collapses"}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room.alerts, "PAUSES_S", ())
        with alerting(rig.run, rig.settings, bus=rig.bus, output=cast(Output, rig.said)):
            rig.bus.emit(sick)

            def is_told() -> bool:
                rig.bus.emit(step_done(1, 9))
                return any(one["event"] == "Notice" for one in rig.events())

            until(is_told, "the alert that failed is an event")
            rig.bus.emit(ended("done"))
    notices = [one["text"] for one in rig.events() if one["event"] == "Notice"]
    assert len(notices) == 2 and "the alert of entropy-collapse was not delivered to" in notices[0]
    assert "the alert of end was not delivered to false: exit code 1 (1 try)" in notices[1]
    assert rig.said.lines == notices[1:]


def test_one_that_hangs_holds_up_no_event_and_is_waited_for_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    monkeypatch.setattr(room.alerts, "run_command", lambda *_, **__: held.wait(300))
    monkeypatch.setattr(room, "END_S", 0.2)
    monkeypatch.setattr(room, "_UNREPORTED_WAIT_S", 0.1)
    rig = rig_in(tmp_path)
    seen = list[Event]()
    rig.bus.listeners.append(seen.append)
    try:
        rig.tell(*(step_done(step, 9) for step in range(1, 9)), ended("done"))
    finally:
        held.set()
    assert len(seen) == 9
    assert "sending the last alert to" in rig.said.lines[0]
    assert "stopped waiting for the last alert" in rig.said.lines[1]
    assert isinstance(rig.events()[-1], dict) and rig.events()[-1]["event"] == "Notice"


def test_nobody_to_tell_is_no_listener(tmp_path: Path) -> None:
    rig = rig_in(tmp_path)
    rig.settings = RunSettings()
    before = len(rig.bus.listeners)
    rig.tell(ended("done"))
    assert len(rig.bus.listeners) == before and not describe_alerts(rig.settings)


def test_a_run_that_falls_silent_is_an_alert_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(room, "longest_silence_s", lambda usual_s: usual_s / 100)
    rig = rig_in(tmp_path)
    with alerting(rig.run, rig.settings, bus=rig.bus, output=cast(Output, rig.said)):
        rig.bus.emit(step_done(2, 9, step_s=1.0))
        until(rig.alerts, "the alert of a stall")
    [alert] = rig.alerts()
    assert alert["alert"] == "stall" and alert["fix"].startswith("miles why")
    assert "stall at step 2 of 9: the run has written nothing for" in alert["text"]


@pytest.mark.parametrize(
    "done",
    [
        EvalDone(
            step=1,
            accuracy=0.5,
            num_prompts=1,
            truncated_fraction=0.0,
            response_tokens_mean=1.0,
            seconds=100.0,
            path="",
        ),
        ValidationDone(step=1, loss=1.0, num_rows=1, seconds=100.0),
    ],
)
def test_a_silence_is_measured_by_the_usual_step_and_evaluation(done: Event) -> None:
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room.time, "monotonic", lambda: now[0])
        silence = SilenceMeter()
        now[0] = 9000.0
        assert silence.take_silence() is None, "nothing is usual yet"
        silence.record(step_done(1, 9, step_s=30.0))
        now[0] += 299.0
        assert silence.take_silence() is None
        now[0] += 2.0
        assert silence.take_silence() == 301.0 and silence.take_silence() is None
        silence.record(PhaseStarted(phase="eval"))
        now[0] += 3599.0
        assert silence.take_silence() is None, "the first evaluation may be long"
        now[0] += 2.0
        assert silence.take_silence() == 3601.0
        silence.record(done)
        silence.record(PhaseStarted(phase="eval"))
        now[0] += 999.0
        assert silence.take_silence() is None
        now[0] += 2.0
        assert silence.take_silence() == 1001.0
        silence.record(PhaseStarted(phase="eval"))
        silence.record(done)
        now[0] += 302.0
        assert silence.take_silence() == 302.0, "the evaluation is over"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("stalled", "--set run.alerts_on=[stall]"),
        ("entropy", "--set run.alerts_on=[entropy-collapse]"),
        ("rollout-bound", "--set run.alerts_on="),
    ],
)
def test_what_no_event_tells_of_is_refused(name: str, fix: str) -> None:
    with pytest.raises(RecipeError) as refused:
        list(require_alerts(RunSettings(alerts_on=["end", name])))
    assert refused.value.fixes[0].startswith(fix)


def test_the_dry_run_says_who_is_told() -> None:
    settings = RunSettings(alerts=["$A_WEBHOOK", "cat x"], alerts_on=["end", "stall"])
    assert describe_alerts(settings) == "$A_WEBHOOK, cat, on end, stall"
