"""`memory`: what the plan expects of a device, what was measured there, and what the processes of
the run held in main memory over time."""

from __future__ import annotations

from typing import Any

from milescli.checkpoint.run_dir import RunDir, read_jsonl
from milescli.insight.facts import read_facts
from milescli.platform.memory_record import FILE
from milescli.web.asked import Asked, Json

MAX_POINTS = 2000
"""Of main memory over time; then every second is left out."""
PHASES = ("training", "rollout")


def memory(asked: Asked) -> Json:
    """Each part empty where nothing is known of it: a plan for a CPU forecasts nothing."""
    forecast = read_facts(asked.with_logs).plan.get("forecast") or {}
    with asked.history() as history:
        measured = [dict(device) for device in history.memory.values()]
    planned = [
        {"phase": phase, "parts": forecast[phase]} for phase in PHASES if forecast.get(phase)
    ]
    return {
        "device": forecast.get("device"),
        "memory_bytes": forecast.get("memory_bytes"),
        "planned": planned,
        "measured": measured,
        "over_time": _over_time(asked.with_logs),
    }


def _over_time(run: RunDir) -> list[Json]:
    """Of all attempts. Processes of one name count together."""
    points = [
        point
        for attempt in run.attempts()
        for record in read_jsonl(attempt / FILE)
        if (point := _point(record)) is not None
    ]
    while len(points) > MAX_POINTS:
        points = points[::2]
    return points


def _point(record: dict[str, Any]) -> Json | None:
    held, names = record.get("resident_bytes"), record.get("names")
    time_s = record.get("time")
    if not isinstance(held, dict) or not isinstance(time_s, int | float):
        return None  # the last line of an attempt counts out-of-memory kills alone
    names = names if isinstance(names, dict) else {}
    together = dict[str, int]()
    for pid, size_bytes in held.items():
        if isinstance(size_bytes, int):
            name = str(names.get(pid, pid))
            together[name] = together.get(name, 0) + size_bytes
    return {"time_s": time_s, "resident_bytes": together}
