"""Memory of each device, measured and planned, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milescli.checkpoint.run_dir import RunDir
from milescli.insight.facts import RunFacts
from milescli.insight.history import History
from milescli.platform.memory_record import FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What one process or device holds."""

    worker: str
    """trainer-0, engine-1-scheduler, driver; as logs are called."""
    used_bytes: int
    """The newest that was seen."""
    planned_bytes: int | None
    """Of the plan, for the fullest device; None: the plan of a CPU foresees none."""
    total_bytes: int | None


def memory_of(run: RunDir, history: History, facts: RunFacts) -> list[DeviceMemory]:
    """Devices as ranks told of them; else processes as the watchdog saw them, the largest first."""
    if history.memory:
        return [_of_device(told, facts) for told in history.memory.values()]
    newest = last_record(run)
    if newest is None:
        return []
    names = newest.get("names", {})
    sizes = {names.get(pid, pid): size for pid, size in newest["resident_bytes"].items()}
    return [
        DeviceMemory(worker=str(name), used_bytes=int(size), planned_bytes=None, total_bytes=None)
        for name, size in sorted(sizes.items(), key=lambda told: -told[1])
    ]


def last_record(run: RunDir) -> Mapping[str, Any] | None:
    """The newest line of the newest attempt's memory.jsonl that has sizes."""
    attempts = run.attempts()
    return next(reversed(records(run, attempts[-1].name)), None) if attempts else None


def records(run: RunDir, attempt: str) -> list[dict[str, Any]]:
    """All lines of an attempt that have sizes: time, resident_bytes by pid, names by pid."""
    try:
        lines = (run.path / "logs" / attempt / FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    told = list[dict[str, Any]]()
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("resident_bytes"):
            told.append(record)
    return told


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
        used_bytes=int(told.get("used_bytes") or told.get("reserved_bytes") or 0),
        planned_bytes=planned_bytes(facts),
        total_bytes=int(total) if total else None,
    )
