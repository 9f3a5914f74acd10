"""What the processes of an attempt held before its end, and whether the kernel ended any for want
of memory: of memory.jsonl, which the watchdog writes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from milescli.checkpoint.run_dir import read_jsonl
from milescli.core.units import format_bytes
from milescli.platform.memory_record import FILE, sizes_by_name

NUM_POINTS = 6
"""Of the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of the processes on the driver's computer."""

    curve: list[tuple[str, int]]
    """(time, bytes that all processes hold), evenly chosen, the last one included."""
    peak: dict[str, int]
    """Process -> bytes it held when all together held most, the largest first."""
    oom_kills: int | None
    """Processes of this control group that the kernel ended for want of memory during the attempt;
    None where the system does not say."""

    def lines(self) -> list[str]:
        """For people."""
        if not self.curve:
            return []
        curve = ", ".join(f"{format_bytes(size)} at {time[11:19]}" for time, size in self.curve)
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.peak.items())
        kills = {None: "the system does not count them", 0: "none"}.get(
            self.oom_kills, f"{self.oom_kills}"
        )
        return [
            f"all processes here: {curve}",
            f"when they held most: {held}",
            f"ended by the kernel for want of memory: {kills}",
        ]


def read_memory(log_dir: Path) -> Memory:
    """Of an attempt; empty where nothing was written."""
    records = list(read_jsonl(log_dir / FILE))
    looks: list[dict[str, Any]] = [record for record in records if record.get("resident_bytes")]
    counts = [record["oom_kills"] for record in records if record.get("oom_kills") is not None]
    chosen = {round(i * (len(looks) - 1) / (NUM_POINTS - 1)) for i in range(NUM_POINTS)}
    peak = sizes_by_name(max(looks, key=_total)) if looks else {}
    return Memory(
        curve=[
            (_utc(looks[i]["time"]), _total(looks[i]))
            for i in sorted(chosen)
            if 0 <= i < len(looks)
        ],
        peak=dict(sorted(peak.items(), key=lambda item: -item[1])[:8]),
        oom_kills=counts[-1] - counts[0] if counts else None,
    )


def _total(look: dict[str, Any]) -> int:
    return sum(look["resident_bytes"].values())


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
