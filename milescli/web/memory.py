"""`memory`: what the plan expects of a device, what was measured there, and what the processes of
the run held in main memory over time."""

from __future__ import annotations

from milescli.checkpoint.run_dir import RunDir
from milescli.insight.facts import read_facts
from milescli.insight.memory import records
from milescli.platform.memory_record import sizes_by_name
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
    """Of all attempts."""
    points = [
        {"time_s": record["time"], "resident_bytes": sizes_by_name(record)}
        for attempt in run.attempts()
        for record in records(attempt)
    ]
    while len(points) > MAX_POINTS:
        points = points[::2]
    return points
