"""Decides which events of a run are alerts, and passes them to `trackers.alerts`, in one thread per
target of `run.alerts`. It only observes: it never changes, delays or ends a run. `train` uses it;
if a driver died, its parent process sends the alert by `alert_of_death`."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from milescli.checkpoint.run_dir import RunDir, step_done
from milescli.console.output import Output
from milescli.core.errors import MilesError
from milescli.core.events import (
    AdapterEvent,
    EvalDone,
    Event,
    EventBus,
    Notice,
    PhaseStarted,
    RowStepDone,
    RunEnded,
    StepDone,
    ValidationDone,
    VerdictGiven,
)
from milescli.core.private import without_private
from milescli.core.units import format_duration, format_time
from milescli.insight.diagnoses.engines import longest_silence_s, usual_in_eval_s
from milescli.insight.series import MAX_WINDOW
from milescli.recipe.alerts import describe_alerts
from milescli.recipe.machine import RunSettings
from milescli.runtime.recording.listeners import EventLog
from milescli.runtime.recovery.stops import BY_USER
from milescli.trackers import alerts
from milescli.trackers.alerts import AlertSender
from milescli.trackers.background import BackgroundTracker

LOOK_EVERY_S = 5.0
"""Seconds between two checks for a stall."""
END_S = alerts.LONGEST_S + 5.0
"""Longest wait for the last alerts of a run, in seconds."""
_UNREPORTED_WAIT_S = 1.0
"""Shorter waits, in seconds, are not reported."""
_MAX_TEXT = 600
_MOMENT_OF = {"done": "end", "failed": "failure", "killed": "failure", "stopped": "stop"}
Alert = dict[str, Any]


@contextmanager
def alerting(
    run: RunDir, settings: RunSettings, *, bus: EventBus, output: Output
) -> Iterator[None]:
    """Send the alerts of the attempt within the context; at its end wait for them within a bound.
    An alert that is not delivered becomes a line in events.jsonl and a warning."""
    if not describe_alerts(settings):
        yield
        return
    listener = Alerting(run, settings, bus=bus)
    bus.listeners.append(listener)
    try:
        yield
    except BaseException as error:
        listener.alert_of_error(error)
        raise
    finally:
        listener.close(output)


def alert_of_death(
    run: RunDir, settings: RunSettings, error: MilesError, *, outcome: str, output: Output
) -> None:
    """Send the alerts of an attempt whose driver died before it could report its end."""
    bus, cause = EventBus(), error.as_dict()
    with alerting(run, settings, bus=bus, output=output):
        bus.emit(RunEnded(outcome=outcome, step=step_done(run.events()), seconds=0.0, error=cause))


class Alerting:
    """Sends the alerts of one attempt: a listener that turns events, and long silence, into
    alerts."""

    def __init__(self, run: RunDir, settings: RunSettings, *, bus: EventBus) -> None:
        self._run, self._bus, self._wanted = run, bus, frozenset(settings.alerts_on)
        self._senders = [AlertSender(entry, os.environ) for entry in dict.fromkeys(settings.alerts)]
        self._threads = [
            BackgroundTracker(sender.shown, lambda one=sender: one, max_waiting=alerts.MAX_WAITING)
            for sender in self._senders
        ]
        self._step, self._num_steps = 0, None
        self._headline, self._has_ended = "", False
        self._diagnosed = set[str]()
        self._silence = SilenceMeter()
        self._is_over = threading.Event()
        if "stall" in self._wanted:
            threading.Thread(target=self._watch, name="alerts: stall", daemon=True).start()

    def __call__(self, event: Event) -> None:
        """Send an alert if the event requires one; warn of an alert that was not delivered."""
        self._silence.record(event)
        if isinstance(event, AdapterEvent):
            return
        if isinstance(event, StepDone | RowStepDone):
            self._step, self._num_steps = event.step, event.num_steps
        elif isinstance(event, VerdictGiven):
            self._take_verdict(event)
        elif isinstance(event, RunEnded):
            self._take_end(event)
        if self._has_ended:
            return  # `close` says the rest
        for text in self._take_problems():
            self._bus.emit(Notice(text=text, level="warning"))

    def alert_of_error(self, error: BaseException) -> None:
        """Send the alert of an error that ended the attempt before it could emit its end."""
        if self._has_ended or isinstance(error, GeneratorExit):
            return
        cause = error.as_dict() if isinstance(error, MilesError) else {"error": repr(error)}
        by_user = isinstance(error, (*BY_USER, KeyboardInterrupt, SystemExit))
        outcome = "stopped" if by_user else "failed"
        self._take_end(RunEnded(outcome=outcome, step=self._step, seconds=0.0, error=cause))

    def close(self, output: Output) -> None:
        """Wait for the alerts that are being sent, within the bound; then warn of those that were
        not delivered. A signal ends the wait."""
        self._is_over.set()
        for thread in self._threads:
            thread.close("")
        try:
            is_sent = self._wait(_UNREPORTED_WAIT_S)
            if not is_sent:
                who = ", ".join(one.name for one in self._threads if not one.wait(0.0))
                output.note(f"sending the last alert to {who}: at most {END_S:g} s")
                is_sent = self._wait(END_S)
        except (KeyboardInterrupt, SystemExit):  # the run is over, and has said how
            is_sent = False
        missing = self._take_problems()
        for sender in self._senders:
            sender.gives_up.set()
        if not is_sent:
            slow = [one.name for one in self._threads if not one.wait(0.0)]
            missing += [f"stopped waiting for the last alert to {who}" for who in slow]
        if missing:
            log = EventLog(self._run.events_file)
        for text in missing:
            output.warn(text)
            log(Notice(text=text, level="warning"))

    def _wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all(one.wait(deadline - time.monotonic()) for one in self._threads)

    def _take_problems(self) -> list[str]:
        problems = [text for one in self._threads for text in one.take_messages()]
        for sender in self._senders:
            while not sender.failures.empty():
                problems.append(sender.failures.get())
        return problems

    def _take_verdict(self, verdict: VerdictGiven) -> None:
        self._headline = verdict.headline
        for name in verdict.findings.keys() & self._wanted - self._diagnosed:
            self._diagnosed.add(name)
            self._send(name, verdict.findings[name], diagnosis=name)

    def _take_end(self, ended: RunEnded) -> None:
        self._has_ended = True
        self._is_over.set()
        self._step = max(self._step, ended.step)
        cause = ended.error or {}
        words = {
            "end": self._headline or f"done after {format_duration(ended.seconds)}",
            "stop": str(cause.get("error", "stopped")),
            "failure": str(cause.get("error", "the cause is unknown")),
        }
        moment = _MOMENT_OF.get(ended.outcome, "failure")
        fixes = cause.get("fix")
        self._send(
            moment,
            words[moment],
            why=str(cause.get("why", "")),
            fix=str(fixes[0]) if isinstance(fixes, Sequence) and fixes else "",
        )

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            if silent_s := self._silence.take_silence():
                text = f"the run has written nothing for {format_duration(silent_s)}"
                self._send("stall", text, fix=f"miles why {self._run.typed}")

    def _send(self, moment: str, text: str, **more: str) -> None:
        if moment not in self._wanted:
            return
        at = f"step {self._step}" + f" of {self._num_steps}" * bool(self._num_steps)
        line = without_private(f"{self._run.full_name}, {moment} at {at}: {text}")[:_MAX_TEXT]
        alert: Alert = {
            "alert": moment,
            "run": self._run.full_name,
            "step": self._step,
            "num_steps": self._num_steps,
            "text": line,
            "content": line,
            "host": socket.gethostname(),
            "time": format_time(time.time()),
            **{name: without_private(said)[:_MAX_TEXT] for name, said in more.items() if said},
        }
        for thread in self._threads:
            thread.put(alert)


class SilenceMeter:
    """Measures how long a run has emitted no event, compared with its usual step. `record` and
    `take_silence` are called from different threads."""

    def __init__(self) -> None:
        self._steps = deque[float](maxlen=MAX_WINDOW)
        self._evals_s, self._phase = deque[float](maxlen=MAX_WINDOW), ""
        self._last_s = time.monotonic()
        self._is_told = False

    def record(self, event: Event) -> None:
        """Record an event: its time ends the current silence."""
        done = event.event if isinstance(event, AdapterEvent) else event
        if isinstance(done, StepDone):
            self._steps.append(done.seconds.step_s)
        elif isinstance(done, RowStepDone):
            self._steps.append(done.step_s)
        elif isinstance(done, EvalDone | ValidationDone):
            self._evals_s.append(done.seconds)
            self._phase = ""
        elif isinstance(done, PhaseStarted):
            self._phase = done.phase
        self._last_s, self._is_told = time.monotonic(), False

    def take_silence(self) -> float | None:
        """Return the seconds of a silence that is too long, once per silence; None if there is
        none, or no step was done yet."""
        steps, silent_s = tuple(self._steps), time.monotonic() - self._last_s
        if not steps or self._is_told:
            return None
        usual_s = sum(steps) / len(steps)
        if self._phase == "eval":
            usual_s = usual_in_eval_s(usual_s, tuple(self._evals_s))
        if silent_s <= longest_silence_s(usual_s):
            return None
        self._is_told = True
        return silent_s
