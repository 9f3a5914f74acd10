"""Implements the endpoints of one run that only read: its summary, how it began and ended, its
events, memory, timeline, recipe, plan and manifest. Plain functions: request in, JSON values out;
called by `app`."""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from milescli.autopsy.why import find_why
from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.run_lock import state_of
from milescli.core.errors import RecipeError
from milescli.core.files import read_regular_text
from milescli.core.history import NoticeEntry
from milescli.insight import series
from milescli.insight.facts import RunFacts, read_facts
from milescli.insight.memory import records
from milescli.insight.summary import summarize
from milescli.insight.timeline import beside_steps, of_run, of_steps
from milescli.platform.memory_record import sizes_by_name
from milescli.recipe import reader
from milescli.web.run_request import Json, RunRequest


def summary(request: RunRequest) -> Json:
    """Return the current summary of a run or an adapter, and the error that ended it."""
    facts = read_facts(request.run)
    with request.history() as history:
        return {**asdict(summarize(request.run, history, facts)), "error": history.error}


NEEDS_NO_REASON = ("not started", "running", "done")
"""States of a run that need no explanation."""


def why(request: RunRequest) -> Json:
    """Explain what ended the newest attempt, as `miles why` does; only return `state` if nothing
    needs to be explained."""
    run = request.with_logs
    with request.history() as history:
        state = state_of(run, outcome=history.outcome)
    if state in NEEDS_NO_REASON:
        return {"state": state}
    found = asdict(find_why(run))
    log = Path(found.pop("first_log") or "")
    is_ours = log.is_file() and not log.is_symlink()
    return {
        **found,
        "state": state,
        "log": {"attempt": log.parent.name, "file": log.name} if is_ours else None,
        "last_lines": found["last_lines"] if is_ours else "",
    }


NUM_LOSSES = 160
"""Number of warm-up losses that are drawn."""


def beginning(request: RunRequest) -> Json:
    """Return what the newest attempt did before its first step: its phases with their seconds, and
    the progress of the warm-up. `warmup` is None if there was none."""
    with request.history() as history:
        warm, began_s = history.warmup, history.began_s
        spans = [span for span in history.spans if not span.begin_s < began_s]
        losses = list(warm.points("loss"))
        step_s = series.mean(series.recent(warm.get("step_s")))
        left = history.warmup_steps - (warm.steps[-1] if warm.steps else 0)
        return {
            "phases": [{"name": one.phase, "seconds": one.end_s - one.begin_s} for one in spans],
            "warmup": {
                "step": warm.steps[-1],
                "num_steps": history.warmup_steps,
                "losses": losses[:: 1 + len(losses) // NUM_LOSSES],
                "first": losses[0][1] if losses else None,
                "last": losses[-1][1] if losses else None,
                "left_s": step_s * left,
            }
            if warm.steps
            else None,
        }


MAX_LIMIT = 5000


def notices(request: RunRequest) -> Json:
    """List the notices of the run that match the query, oldest first; `offset` counts the matching
    ones."""
    query = request.query
    kind, level, text = query.text("kind"), query.text("level"), query.text("q").lower()
    offset, limit = query.count("offset", 0), query.count("limit", 200, high=MAX_LIMIT)
    with request.history() as history:
        fitting = [one for one in history.notices if _fits(one, kind=kind, level=level, text=text)]
    shown = fitting[offset : offset + limit]
    return {"total": len(fitting), "notices": [asdict(one) for one in shown]}


def _fits(one: NoticeEntry, *, kind: str, level: str, text: str) -> bool:
    return (
        (not kind or one.kind == kind)
        and (not level or one.level == level)
        and (not text or text in one.text.lower() or text in one.kind.lower())
    )


MAX_POINTS = 2000
"""Largest number of points of main memory over time; if there are more, every second one is left
out."""
PHASES = ("training", "rollout")


def memory(request: RunRequest) -> Json:
    """Return planned and measured memory; unknown parts are empty: a plan for a CPU has no
    forecast."""
    forecast = read_facts(request.with_logs).plan.get("forecast") or {}
    with request.history() as history:
        measured = [dict(device) for device in history.memory.values()]
    planned = [
        {"phase": phase, "parts": forecast[phase]} for phase in PHASES if forecast.get(phase)
    ]
    return {
        "device": forecast.get("device"),
        "memory_bytes": forecast.get("memory_bytes"),
        "planned": planned,
        "measured": measured,
        "over_time": _over_time(request.with_logs),
    }


def _over_time(run: RunDir) -> list[Json]:
    """Return the main memory of each process over time, of all attempts."""
    points = [
        {"time_s": record["time"], "resident_bytes": sizes_by_name(record)}
        for attempt in run.attempts()
        for record in records(attempt)
    ]
    while len(points) > MAX_POINTS:
        points = points[::2]
    return points


MAX_INTERVALS = 20_000
"""Largest number of intervals; the newest are returned."""
PROFILE = re.compile(r"profile (\d{1,6}) is in ")
"""Matches the notice that `runtime.profiler` emits for a complete profile."""
DEFAULT_STEPS = 50


def timeline(request: RunRequest) -> Json:
    """Return the intervals of the steps `first` to `last`, by default of the last 50. The first
    step includes what was before it, the last one what came after."""
    with request.history() as history:
        steps = history.columns.steps
        newest = steps[-1] if steps else 0
        last = request.query.count("last", newest)
        first = request.query.count("first", max(1, last - DEFAULT_STEPS + 1))
        intervals = of_steps(history, first=first, last=last)
        begin_s = min((one.begin_s for one in intervals), default=math.nan)
        end_s = max((one.end_s for one in intervals), default=math.nan)
        notices = [one for one in history.notices if one.kind == "Notice"]
        begin_s = -math.inf if not steps or first <= steps[0] else begin_s
        end_s = math.inf if last >= newest else end_s
        beside = [*of_run(history), *beside_steps(history)]
        # those that touch the window and are known: NaN is in no order
        intervals += [one for one in beside if one.end_s >= begin_s and one.begin_s <= end_s]
    intervals = sorted(intervals, key=lambda one: one.begin_s)[-MAX_INTERVALS:]
    return {
        "begin_s": min((one.begin_s for one in intervals), default=None),
        "end_s": max((one.end_s for one in intervals), default=None),
        "intervals": [asdict(one) for one in intervals],
        "profiles": _profiles(request, notices),
    }


def _profiles(request: RunRequest, notices: Sequence[NoticeEntry]) -> list[Json]:
    """Return the profiles that the run's notices name: the time of each, and its traces."""
    found = ((PROFILE.match(one.text), one.time_s) for one in notices)
    folder = request.with_logs.profiles_dir
    return [
        {"number": int(match[1]), "time_s": time_s, "files": _files(folder / match[1])}
        for match, time_s in found
        if match
    ]


def _files(folder: Path) -> list[Json]:
    """List names and sizes of files; return an empty list if the folder does not exist or is a
    link."""
    try:
        seen = [] if folder.is_symlink() else [(one.name, one.lstat()) for one in folder.iterdir()]
    except OSError:
        return []
    return [
        {"name": name, "size_bytes": seen_file.st_size}
        for name, seen_file in sorted(seen)
        if stat.S_ISREG(seen_file.st_mode) and not name.startswith(".")
    ]


MAX_BYTES = 4 * 2**20
"""Largest recipe that is read."""


def recipe(request: RunRequest) -> Json:
    """Return every key by its dotted name, its value, and who set it."""
    return {"keys": _keys(request.run) or _keys(request.with_logs)}


def plan(request: RunRequest) -> Json:
    """Return plan.json, with alternative layouts that were compared under `alternatives`."""
    written = dict(_facts(request).plan)
    forecast = written.get("forecast") or {}
    empty: Json = {"decisions": [], "slots": [], "trainer": {}, "engines": {}, "roles": []}
    return {**empty, **written, "alternatives": forecast.get("alternatives", [])}


def manifest(request: RunRequest) -> Json:
    """Return manifest.json without the recipe, which `recipe` returns."""
    return {name: value for name, value in _facts(request).manifest.items() if name != "recipe"}


def _facts(request: RunRequest) -> RunFacts:
    own = read_facts(request.run)
    return own if own.plan or own.manifest else read_facts(request.with_logs)


def _keys(run: RunDir) -> list[Json]:
    try:
        if run.recipe_file.stat().st_size > MAX_BYTES:
            return []
        text = read_regular_text(run.recipe_file, errors="replace")
        root = reader.read(text, source=str(run.recipe_file))
    except (OSError, RecipeError):
        values = read_facts(run).recipe  # as the manifest has it, without origins
        return [{"key": key, "value": value, "origin": ""} for key, value in values.items()]
    return _flat(root)


def _flat(node: reader.YamlNode, above: str = "") -> list[Json]:
    """Flatten a mapping of YAML: a mapping over several lines is a section; one on a single line,
    `{a: 1}`, is a value."""
    if not isinstance(node.value, dict):
        return []
    keys = list[Json]()
    for name, child in node.value.items():
        key = f"{above}{name}"
        is_section = isinstance(child.value, dict) and not child.comment
        if is_section and child.value:
            keys += _flat(child, f"{key}.")
        else:
            keys.append({"key": key, "value": reader.as_written(child), "origin": child.comment})
    return keys
