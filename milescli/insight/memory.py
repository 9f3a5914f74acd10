"""Memory of each device, measured and planned, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milescli.checkpoint.run_dir import RunDir, read_jsonl
from milescli.insight.facts import RunFacts
from milescli.insight.history import History
from milescli.platform.memory_record import FILE, sizes_by_name

SMALL = 32 * 2**20
"""Bytes: helpers of Ray and of engines that hold less are not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What one process or device holds."""

    worker: str
    """trainer-0, engine-1-scheduler, driver; as logs are called."""
    used_bytes: int
    """The newest that was seen."""
    peak_bytes: int
    """The most that was seen."""
    planned_bytes: int | None
    """Of the plan, for the fullest device; None: the plan of a CPU foresees none."""
    total_bytes: int | None


def memory_of(run: RunDir, history: History, facts: RunFacts) -> list[DeviceMemory]:
    """Devices as ranks told of them; on a CPU processes as the watchdog saw them in the newest
    attempt, the largest first."""
    if any(told.get("total_bytes") for told in history.memory.values()):
        return [_of_device(told, facts) for told in history.memory.values()]
    attempts = run.attempts()
    return _of_processes(records(attempts[-1])) if attempts else []


def records(attempt: Path) -> list[Mapping[str, Any]]:
    """Lines of an attempt's memory.jsonl that have sizes, oldest first: time, resident_bytes by
    pid, names by pid. Raises OSError where they are not ours to read."""
    lines = read_jsonl(attempt / FILE)
    return [one for one in lines if isinstance(one.get("resident_bytes"), dict)]


def _of_processes(seen: Sequence[Mapping[str, Any]]) -> list[DeviceMemory]:
    """The largest first; small ones are left out."""
    used, peaks = dict[str, int](), dict[str, int]()
    for record in seen:
        own = sizes_by_name(record)
        used |= own
        peaks |= {name: max(peaks.get(name, 0), size) for name, size in own.items()}
    return [
        DeviceMemory(
            worker=name,
            used_bytes=used[name],
            peak_bytes=peak,
            planned_bytes=None,
            total_bytes=None,
        )
        for name, peak in sorted(peaks.items(), key=lambda told: -told[1])
        if peak >= SMALL
    ]


def planned_bytes(facts: RunFacts) -> int | None:
    """What the plan foresees on the fullest device; None where it has no forecast."""
    forecast = facts.plan.get("forecast")
    if not forecast:
        return None
    phases = (forecast.get("training", ()), forecast.get("rollout", ()))
    sums = (
        sum(part["size_bytes"] for part in parts if part["name"] != "margin") for parts in phases
    )
    return max(sums, default=None)


def _of_device(told: Mapping[str, Any], facts: RunFacts) -> DeviceMemory:
    total = told.get("total_bytes")
    return DeviceMemory(
        worker=str(told["worker"]),
        used_bytes=int(told.get("used_bytes") or told["peak_bytes"]),
        peak_bytes=int(told.get("reserved_bytes") or told["peak_bytes"]),
        planned_bytes=planned_bytes(facts),
        total_bytes=int(total) if total else None,
    )
