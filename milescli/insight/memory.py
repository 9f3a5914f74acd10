"""Reports the memory of each device, or on a CPU of each process: measured and planned, side by
side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milescli.checkpoint.run_dir import RunDir, read_jsonl
from milescli.core.history import History
from milescli.insight.facts import RunFacts
from milescli.platform.memory_record import FILE, has_sizes, sizes_by_name

OTHERS = "others"
"""Processes without a name in the plan: driver, Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Describes the memory of one process or device."""

    worker: str
    """trainer-rank-0; on a CPU also engine-1 (all its processes), others."""
    used_bytes: int
    """The latest value."""
    peak_bytes: int
    """The largest value; of main memory, without shared pages that are counted for other processes.
    """
    planned_bytes: int | None
    """Planned bytes, for the fullest device or for this process; None: the plan has no estimate."""
    total_bytes: int | None


def memory_of(run: RunDir, history: History, facts: RunFacts) -> list[DeviceMemory]:
    """Return the memory of devices as ranks reported it; on a CPU that of processes as the watchdog
    saw them in the newest attempt, the largest first."""
    if any(device.get("total_bytes") for device in history.memory.values()):
        return [_of_device(device, facts) for device in history.memory.values()]
    attempts = run.attempts()
    with suppress(OSError):
        return _of_processes(records(attempts[-1]), _planned(facts)) if attempts else []
    return []


def records(attempt: Path) -> list[Mapping[str, Any]]:
    """Return the lines of an attempt's memory.jsonl that have sizes, oldest first: time,
    resident_bytes by pid, names by pid. Raises OSError if the file cannot be read."""
    return [one for one in read_jsonl(attempt / FILE) if has_sizes(one)]


def courses_of(run: RunDir) -> dict[str, list[tuple[float, int]]]:
    """Return process of the newest attempt -> (seconds since 1970, resident bytes), in order;
    processes without a name in the plan are one. Empty if nothing can be read."""
    attempts = run.attempts()
    courses = dict[str, list[tuple[float, int]]]()
    with suppress(OSError):
        for record in records(attempts[-1]) if attempts else ():
            for name, size in _by_plan(sizes_by_name(record)).items():
                courses.setdefault(name, []).append((float(record["time"]), size))
    return courses


def _of_processes(
    records: Sequence[Mapping[str, Any]], planned: Mapping[str, int]
) -> list[DeviceMemory]:
    """Return the memory of processes, the largest first; processes without a name in the plan are
    one."""
    used, peaks = dict[str, int](), dict[str, int]()
    for record in records:
        used |= _by_plan(sizes_by_name(record))
        own = _by_plan(_peaks(record))
        peaks |= {name: max(peaks.get(name, 0), size) for name, size in own.items()}
    return [
        DeviceMemory(
            worker=name,
            used_bytes=min(used[name], peak),
            peak_bytes=peak,
            planned_bytes=planned.get(name),
            total_bytes=None,
        )
        for name, peak in sorted(peaks.items(), key=lambda item: -item[1])
    ]


def _peaks(record: Mapping[str, Any]) -> dict[str, int]:
    """Return process -> peak bytes; for a record of an older version, the resident bytes."""
    return sizes_by_name(record, of="peak_bytes" if "peak_bytes" in record else "resident_bytes")


def _by_plan(sizes: Mapping[str, int]) -> dict[str, int]:
    """Group processes by the plan's names: those of an engine count as one."""
    sizes_by_plan = dict[str, int]()
    for name, size in sizes.items():
        found = _IN_PLAN.match(name)
        of = found[0] if found else OTHERS
        sizes_by_plan[of] = sizes_by_plan.get(of, 0) + size
    return sizes_by_plan


_IN_PLAN = re.compile(r"(trainer-rank|engine)-\d+")


def _planned(facts: RunFacts) -> dict[str, int]:
    """Return process -> bytes of its peak, by the plan of a CPU's first node; empty for devices."""
    return {
        str(one["name"]): max(one["phases"].values(), default=0)
        for one in facts.plan.get("processes", ())
        if one["node"] == 0
    }


def planned_bytes(facts: RunFacts) -> int | None:
    """Return the planned bytes of the fullest device; None if the plan has no forecast."""
    forecast = facts.plan.get("forecast")
    if not forecast:
        return None
    phases = (forecast.get("training", ()), forecast.get("rollout", ()))
    sums = (
        sum(part["size_bytes"] for part in parts if part["name"] != "margin") for parts in phases
    )
    return max(sums, default=None)


def _of_device(device: Mapping[str, Any], facts: RunFacts) -> DeviceMemory:
    total = device.get("total_bytes")
    return DeviceMemory(
        worker=str(device["worker"]),
        used_bytes=int(device.get("used_bytes") or device["peak_bytes"]),
        peak_bytes=int(device.get("reserved_bytes") or device["peak_bytes"]),
        planned_bytes=planned_bytes(facts),
        total_bytes=int(total) if total else None,
    )
