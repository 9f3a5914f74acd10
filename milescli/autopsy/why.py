"""Why a run ended as it did: its verdict, what happened before on a timeline, the process that died
first with the end of its log, memory, and what the kernel says. Reads files alone; called by
`miles why`, and at every bad end."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milescli.autopsy.kernel import kernel_lines
from milescli.autopsy.memory import Memory, read_memory
from milescli.checkpoint.run_dir import (
    STEP_EVENTS,
    RunDir,
    read_jsonl,
    resume_command,
    step_done,
    step_saved,
    verdict_file,
)
from milescli.checkpoint.run_lock import is_locked
from milescli.core.files import last_log_lines
from milescli.core.units import format_time, parse_time

Record = dict[str, Any]
NUM_MOMENTS = 16
"""On the timeline; what is left out is counted."""
BAD = ("failed", "killed")
BY_USER = ("Interrupted", "Terminated", "KeyboardInterrupt()")
"""Kinds of errors; the last is how a verdict has one that is not ours."""
_RESUMED = re.compile(r"\bmiles resume\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What is known of the end of a run's newest attempt."""

    run: str
    attempt: int
    outcome: str
    """not started, running, done, stopped, failed, killed."""
    summary: str
    """One line."""
    step: int
    """Steps done."""
    cause: Record | None
    """The error that ended it: error, why, fix, kind."""
    first: str | None
    """Process that died first, where one did."""
    first_log: str | None
    """Path of its log."""
    last_lines: str
    """Of that log."""
    timeline: list[tuple[str, str]]
    """(time, what happened), UTC."""
    memory: Memory | None
    kernel: list[str] | None
    """None: the kernel's log may not be read."""
    next: list[str]
    """Commands."""

    @property
    def is_bad(self) -> bool:
        """There is something to explain."""
        return self.outcome in BAD


def find_why(run: RunDir, *, is_over: bool = False) -> Why:
    """Of the newest attempt. `is_over`: its driver says so, which still holds the run's lock."""
    attempts = run.attempts()
    log_dir = attempts[-1] if attempts else None
    verdict = (next(read_jsonl(verdict_file(log_dir)), {}) if log_dir else {}) or {}
    events = _of_newest_attempt(list(run.events()))
    outcome = _outcome(run, log_dir, verdict, is_over=is_over)
    error = verdict.get("error")
    cause = {"kind": "", "why": "", "fix": [], **error} if isinstance(error, dict) else None
    by_user = cause is not None and bool({cause["kind"], cause["error"]} & {*BY_USER})
    if outcome in BAD and by_user:
        outcome = "stopped"
    if outcome == "killed" and cause is None:
        cause = {"error": "the driver was killed", "why": verdict.get("why", ""), "fix": []}
    bad = outcome in BAD and log_dir is not None
    worker = _first_dead(events, cause) if bad else None
    log = _log_of(worker, log_dir) if log_dir is not None else None
    step = int(str(verdict.get("step", 0) or step_done(events)))
    return Why(
        run=run.name,
        attempt=len(attempts),
        outcome=outcome,
        summary=_summary(run, outcome, step, cause, saved=not by_user),
        step=step,
        cause=cause if bad else None,
        first=worker,
        first_log=str(log) if log else None,
        last_lines=last_log_lines(log) if log else "",
        timeline=_timeline(events, log_dir) if bad and log_dir else [],
        memory=read_memory(log_dir) if bad and log_dir else None,
        kernel=kernel_lines(_began(events)) if bad else None,
        next=_next(run, outcome, cause),
    )


def _outcome(run: RunDir, log_dir: Path | None, verdict: Record, *, is_over: bool) -> str:
    if not is_over and is_locked(run):
        return "running"
    return "not started" if log_dir is None else str(verdict.get("outcome", "killed"))


def _summary(run: RunDir, outcome: str, step: int, cause: Record | None, *, saved: bool) -> str:
    if outcome == "running":
        return f"{run.name} is running"
    if outcome == "not started":
        return f"{run.name} was not started"
    if outcome == "done":
        return f"{run.name} ended well, at step {step}"
    if outcome == "stopped":
        return f"{run.name} was stopped by its user after step {step}{', and saved' * saved}"
    what = cause["error"] if cause is not None else "nobody wrote down why"
    return f"{run.name} {'died' if outcome == 'killed' else outcome} at step {step}: {what}"


def _of_newest_attempt(events: list[Record]) -> list[Record]:
    starts = [
        place
        for place, event in enumerate(events)
        if event.get("event") == "PhaseStarted" and event.get("phase") == "start"
    ]
    return events[starts[-1] :] if starts else events


def _first_dead(events: list[Record], cause: Record | None) -> str | None:
    """The first that was lost and never replaced; else whom the error names."""
    lost: dict[str, Record] = {}
    for event in events:
        if event["event"] == "WorkerLost":
            lost.setdefault(str(event["worker"]), event)
        elif event["event"] == "WorkerReplaced":
            lost.pop(str(event["worker"]), None)
    text = next((event["what"] for event in lost.values()), cause["error"] if cause else "")
    named = re.search(r"(engine|trainer rank|router|reward model)( \d+)?", str(text))
    return named[0] if named else next(iter(lost), None)


def _log_of(worker: str | None, log_dir: Path) -> Path | None:
    """Of a process: engines log what matters in the file of their server."""
    if worker is None:
        return None
    stem = worker.replace(" ", "-")
    files = (log_dir / f"{stem}{part}.log" for part in ("-server", ""))
    return next((file for file in files if file.exists()), None)


def _timeline(events: list[Record], log_dir: Path) -> list[tuple[str, str]]:
    steps = [event for event in events if event["event"] in STEP_EVENTS]
    saves = [event for event in events if event["event"] == "CheckpointSaved"]
    kept = [
        (str(event.get("time", "")), text)
        for event in events
        if (text := _moment(event)) and not (event in steps[:-1] or event in saves[:-1])
    ]
    logs = [
        (format_time(file.stat().st_mtime), f"{file.name} was written last")
        for file in log_dir.glob("*.log")
    ]
    moments = sorted([*kept, *logs], key=lambda moment: moment[0])
    if (more := len(moments) - NUM_MOMENTS) > 0:
        moments = [moments[0], ("", f"{more} more"), *moments[more + 1 :]]
    return moments


def _moment(event: Record) -> str | None:
    kind = event["event"]
    if kind == "PhaseStarted" and event["phase"] in ("start", "stop"):
        return f"attempt began: {event['detail']}" if event["phase"] == "start" else "asked to stop"
    if kind in STEP_EVENTS:
        return f"step {event['step']} of {event['num_steps']} was done"
    if kind == "CheckpointSaved":
        return f"checkpoint of step {event['step']} was complete"
    if kind == "WorkerSilent":
        return f"{event['worker']} had not spoken for {event['seconds']:.0f} s: {event['why']}"
    if kind == "WorkerLost":
        return f"{event['what']}; started again (restart {event['restart']})"
    if kind == "WorkerReplaced":
        source = f", {event['source']}" if event.get("source") else ""
        return f"{event['worker']} was there again, after {event['seconds']:.1f} s{source}"
    if kind == "Notice" and event["level"] == "warning":
        return f"warning: {event['text']}"
    if kind == "RunEnded":
        error = event.get("error") or {}
        return f"{event['outcome']}" + (f": {error['error']}" if error else "")
    return None


def _began(events: list[Record]) -> float:
    """Seconds since 1970."""
    return next((parse_time(event["time"]) for event in events if "time" in event), 0.0)


def _next(run: RunDir, outcome: str, cause: Record | None) -> list[str]:
    if outcome in ("running", "not started", "done"):
        return []
    fixes = [str(fix) for fix in (cause or {}).get("fix", []) if "miles why" not in str(fix)]
    if any(_RESUMED.search(fix) for fix in fixes):
        return fixes
    return [*fixes, resume_command(run.shown, step=step_saved(run.events()))]
