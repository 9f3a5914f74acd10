"""Explains what ended a run and what to do next, from logs, memory records and the kernel log.
Shown by `miles why`, and written to `why.txt` when a run dies."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from milescli.checkpoint.run_dir import (
    RunDir,
    is_locked,
    read_jsonl,
    resume_command,
    step_done,
    step_saved,
    verdict_file,
)
from milescli.checkpoint.store import write_atomically
from milescli.core.files import last_log_lines
from milescli.core.scalars import STEP_EVENTS
from milescli.core.units import format_bytes, format_time, parse_time
from milescli.platform.memory_record import FILE, has_sizes, sizes_by_name

LOG = Path("/dev/kmsg")
MAX_LINES = 8
_CAUSE_LINES = re.compile(
    r"Out of memory|oom-kill|Killed process|NVRM: Xid|NVRM: GPU|amdgpu.*(RAS|[Pp]oison|reset|hang|"
    r"ring .* timeout|page fault)|Machine check|Hardware Error"
)


def kernel_lines(since: float, *, records: list[str] | None = None) -> list[str] | None:
    """Return the last lines of the kernel's log since `since` (seconds since 1970) that name a
    cause, each with its time; None if this user may not read the log. `records` replaces the log in
    tests."""
    if records is None:
        try:
            records = list(_records())
        except OSError:
            return None
    boot = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)  # as the log: without suspends
    lines = []
    for record in records:
        head, _, text = record.partition(";")
        text = text.splitlines()[0] if text else ""
        fields = head.split(",")
        if len(fields) < 3 or not fields[2].isdecimal():
            continue  # no line of a kernel
        at = boot + int(fields[2]) / 1e6
        if at >= since and _CAUSE_LINES.search(text):
            lines.append(f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ} {text}")
    return lines[-MAX_LINES:]  # the last ones are next to the end


def _records() -> Iterator[str]:
    log = os.open(LOG, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            with suppress(BrokenPipeError):  # overwritten before we came to it
                record = os.read(log, 8192)
                if not record:  # it is no kernel's log: a container may have /dev/null there
                    return
                yield record.decode(errors="replace")
    except BlockingIOError:  # the end
        return
    finally:
        os.close(log)


NUM_POINTS = 6
"""Number of points of the memory curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Holds the memory of the processes on the driver's computer."""

    curve: list[tuple[str, int]]
    """(time, bytes that all processes hold), evenly chosen, the last one included."""
    peak: dict[str, int]
    """Process -> bytes it held when all together held most, the largest first."""
    oom_kills: int | None
    """Processes of this control group that the kernel killed for lack of memory during the attempt;
    None if the system does not say."""

    def lines(self) -> list[str]:
        """Format the memory for people."""
        if not self.curve:
            return []
        clocks = _clocks([time for time, _ in self.curve])
        curve = ", ".join(
            f"{format_bytes(size)} at {clock}"
            for clock, (_, size) in zip(clocks, self.curve, strict=True)
        )
        sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.peak.items())
        kills = {None: "the system does not count them", 0: "none"}.get(
            self.oom_kills, f"{self.oom_kills}"
        )
        return [
            f"all processes here: {curve}",
            f"at their peak: {sizes}",
            f"killed by the kernel for lack of memory: {kills}",
        ]


def read_memory(log_dir: Path) -> Memory:
    """Read the memory record of an attempt; empty if there is none."""
    records = list(read_jsonl(log_dir / FILE))
    sizes: list[dict[str, Any]] = [record for record in records if has_sizes(record)]
    counts = [count for one in records if isinstance(count := one.get("oom_kills"), int)]
    chosen = {round(i * (len(sizes) - 1) / (NUM_POINTS - 1)) for i in range(NUM_POINTS)}
    peak = sizes_by_name(max(sizes, key=_total)) if sizes else {}
    return Memory(
        curve=[
            (_utc(sizes[i]["time"]), _total(sizes[i]))
            for i in sorted(chosen)
            if 0 <= i < len(sizes)
        ],
        peak=dict(sorted(peak.items(), key=lambda item: -item[1])[:8]),
        oom_kills=counts[-1] - counts[0] if counts else None,
    )


def _clocks(times: list[str]) -> list[str]:
    """Return the time of day of each, equally wide, with its date if they are of several days."""
    begin = 0 if len({time[:10] for time in times if time}) > 1 else len("2026-12-01T")
    return [time[begin:19].replace("T", " ").ljust(19 - begin) for time in times]


def _total(look: dict[str, Any]) -> int:
    return sum(look["resident_bytes"].values())


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Record = dict[str, Any]
NUM_MOMENTS = 16
"""Number of lines of the timeline; the others are counted."""
BAD = ("failed", "killed")
UNSAVED_STOPS = ("Interrupted", "Terminated")
"""Kinds of errors of a run that its user stopped without saving."""
_RESUMED = re.compile(r"\bmiles resume\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Holds what is known about the end of a run's newest attempt."""

    run: str
    attempt: int
    outcome: str
    """not started, running, done, stopped, failed, killed."""
    summary: str
    """One line."""
    step: int
    """Number of completed steps."""
    cause: Record | None
    """The error that ended it: error, why, fix, kind."""
    first: str | None
    """Process that died first, if any."""
    first_log: str | None
    """Path of that process's log."""
    last_lines: str
    """Last lines of that log."""
    timeline: list[tuple[str, str]]
    """(time, what happened), UTC."""
    memory: Memory | None
    kernel: list[str] | None
    """Lines of the kernel's log; None if it is not readable."""
    next: list[str]
    """Commands to try next."""

    @property
    def is_bad(self) -> bool:
        """Return True if there is something to explain."""
        return self.outcome in BAD


def find_why(run: RunDir, *, is_over: bool = False) -> Why:
    """Find out why the newest attempt ended. `is_over` says that its driver, which still holds the
    run's lock, is about to end."""
    attempts = run.attempts()
    log_dir = attempts[-1] if attempts else None
    verdict = (next(read_jsonl(verdict_file(log_dir)), {}) if log_dir else {}) or {}
    events = _of_newest_attempt(list(run.events()))
    verdict = verdict or _end_from_events(events)
    outcome = _outcome(run, log_dir, verdict, is_over=is_over)
    error = verdict.get("error")
    cause = {"kind": "", "why": "", "fix": [], **error} if isinstance(error, dict) else None
    at_once = cause is not None and cause["kind"] in UNSAVED_STOPS
    if outcome == "killed" and cause is None:
        cause = {"error": "the driver was killed", "why": verdict.get("why", ""), "fix": []}
    bad = outcome in BAD and log_dir is not None
    worker = _first_dead(events, cause) if bad else None
    log = _log_of(worker, log_dir) if log_dir is not None else None
    step = verdict.get("step")
    step = step if isinstance(step, int) and step else step_done(events)
    return Why(
        run=run.name,
        attempt=len(attempts),
        outcome=outcome,
        summary=_summary(run, outcome, step, cause, saved=not at_once),
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
    return str(verdict.get("outcome", "not started" if log_dir is None else "killed"))


def _summary(run: RunDir, outcome: str, step: int, cause: Record | None, *, saved: bool) -> str:
    if outcome == "running":
        return f"{run.name} is running"
    if outcome == "not started":
        return f"{run.name} was not started"
    if outcome == "done":
        return f"{run.name} finished normally at step {step}"
    if outcome == "stopped":
        return f"{run.name} was stopped by its user after step {step}{', and saved' * saved}"
    what = cause["error"] if cause is not None else "no cause was recorded"
    return f"{run.name} {'died' if outcome == 'killed' else outcome} at step {step}: {what}"


def _end_from_events(events: list[Record]) -> Record:
    """Return the end of a run as its events report it, for a run whose logs are gone."""
    return next((one for one in reversed(events) if one.get("event") == "RunEnded"), {})


def _of_newest_attempt(events: list[Record]) -> list[Record]:
    starts = [
        place
        for place, event in enumerate(events)
        if event.get("event") == "PhaseStarted" and event.get("phase") == "start"
    ]
    return events[starts[-1] :] if starts else events


def _first_dead(events: list[Record], cause: Record | None) -> str | None:
    """Return the first process that was lost and never replaced; else the one that the error
    names."""
    lost: dict[str, Record] = {}
    for event in events:
        if event["event"] == "WorkerLost":
            lost.setdefault(str(event["worker"]), event)
        elif event["event"] == "WorkerReplaced":
            lost.pop(str(event["worker"]), None)
    text = next((event["what"] for event in lost.values()), cause["error"] if cause else "")
    named = re.search(r"(engine|trainer rank|reward model)( \d+)?", str(text))
    return named[0] if named else next(iter(lost), None)


def _log_of(worker: str | None, log_dir: Path) -> Path | None:
    """Return the log of a process; for an engine, that of its server, which has the useful
    lines."""
    if worker is None:
        return None
    stem = worker.replace(" ", "-")
    files = (log_dir / f"{stem}{part}.log" for part in ("-server", ""))
    return next((file for file in files if file.exists()), None)


def _timeline(events: list[Record], log_dir: Path) -> list[tuple[str, str]]:
    steps = [event for event in events if event["event"] in STEP_EVENTS]
    saves, copies = (
        [event for event in events if event["event"] == kind]
        for kind in ("CheckpointSaved", "CheckpointMirrored")
    )
    earlier = {id(event) for event in (*steps[:-1], *saves[:-1], *copies[:-1])}
    recent = [
        (str(event.get("time", "")), text)
        for event in events
        if (text := _moment(event)) and id(event) not in earlier
    ]
    logs = [
        (format_time(file.stat().st_mtime), f"{file.name} was the last to be written")
        for file in log_dir.glob("*.log")
    ]
    moments = sorted([*recent, *logs], key=lambda moment: moment[0])
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
    if kind == "CheckpointMirrored":
        return f"checkpoint of step {event['step']} was complete in {event['url']}"
    if kind == "WorkerSilent":
        return f"{event['worker']} had been silent for {event['seconds']:.0f} s: {event['why']}"
    if kind == "WorkerLost":
        return f"{event['what']}; restarted (restart {event['restart']})"
    if kind == "WorkerReplaced":
        source = f", {event['source']}" if event.get("source") else ""
        return f"{event['worker']} was back after {event['seconds']:.1f} s{source}"
    if kind == "Notice" and event["level"] == "warning":
        return f"warning: {event['text']}"
    if kind == "RunEnded":
        error = event.get("error") or {}
        return f"{event['outcome']}" + (f": {error['error']}" if error else "")
    return None


def _began(events: list[Record]) -> float:
    """Return the start in seconds since 1970."""
    return next((parse_time(event["time"]) for event in events if "time" in event), 0.0)


def _next(run: RunDir, outcome: str, cause: Record | None) -> list[str]:
    if outcome in ("running", "not started", "done"):
        return []
    fixes = [str(fix) for fix in (cause or {}).get("fix", []) if "miles why" not in str(fix)]
    if any(_RESUMED.search(fix) for fix in fixes):
        return fixes
    return [*fixes, resume_command(run.shown, step=step_saved(run.events()))]


def page(why: Why) -> str:
    """Format the explanation for people; one line if nothing went wrong."""
    if not why.is_bad:
        return why.summary
    lines = [why.summary]
    if why.cause is not None:
        lines += _part("cause", [str(why.cause["error"]), *str(why.cause["why"]).splitlines()])
    if why.first is not None:
        where = f", {why.first_log}" if why.first_log else ", which has no log here"
        lines += _part(f"died first: {why.first}{where}", why.last_lines.splitlines())
    clocks = _clocks([time for time, _ in why.timeline])
    lines += _part(
        f"attempt {why.attempt} (UTC)",
        [f"{clock}  {text}" for clock, (_, text) in zip(clocks, why.timeline, strict=True)],
    )
    if why.memory is not None:
        lines += _part("memory", why.memory.lines())
    kernel = ["this user cannot read its log"] if why.kernel is None else why.kernel
    lines += _part(
        "kernel", kernel or ["contains nothing about memory or GPUs since the attempt began"]
    )
    lines += _part("next", why.next)
    return "\n".join(lines)


def _part(title: str, lines: list[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


_WHY_FILE = "why.txt"
WHAT_IT_TELLS = "what died first, its log, memory"
"""Description of the command, for errors that name it."""


def write_why(log_dir: Path, *, keep: bool = False) -> Path | None:
    """Write the explanation and return its file; None if nothing went wrong or it cannot be
    written, since a damaged record or a full disk must not hide what ended the run. With `keep`, an
    explanation that is already there stays: the watchdog, which knows less than the driver's
    parent, may be the later of the two."""
    file = log_dir / _WHY_FILE
    with suppress(OSError, LookupError, ValueError, TypeError):
        why = find_why(RunDir(log_dir.parent.parent), is_over=True)
        if why.is_bad:
            text = page(why).encode("utf-8", "backslashreplace").decode() + "\n"
            if keep:
                with file.open("x", encoding="utf-8") as new:
                    new.write(text)
            else:
                write_atomically(file, text)
            return file
    return None


if __name__ == "__main__":
    write_why(Path(sys.argv[1]), keep=True)
