"""Writes memory.jsonl beside the logs of an attempt: current and peak memory of the run's processes
on this computer, every ten seconds and at the end of the driver, with the kernel's count of OOM
kills. Written by the watchdog; standard library only. Read by `autopsy` and `insight`."""

from __future__ import annotations

import json
import os
import re
import resource
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milescli.core.files import last_records, parse_json, read_lines

ROOT = Path("/sys/fs/cgroup")


def oom_kills(*, root: Path = ROOT, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the number of OOM kills since the cgroup was created, subgroups included; None if the
    system does not report it."""
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                files = (root / path.lstrip("/") / "memory.events", root / "memory.events")
            elif controllers == "memory":
                v1 = root / "memory"
                files = (v1 / path.lstrip("/") / "memory.oom_control", v1 / "memory.oom_control")
            else:
                continue
            for file in files:
                with suppress(OSError):
                    if count := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
                        return int(count[1])
    return None


FILE = "memory.jsonl"
INTERVAL_S = 10.0
MAX_LINES = 1000
"""Number of lines after which every second one is removed: the older, the coarser."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
GROWTH_TO_RESAMPLE = 1.05
"""Growth of a process's peak, as a factor, after which its shared pages are inspected again: the
kernel then walks through all pages of the process, 12 ms for each GiB."""
SHARED_CHECK_LIMIT = 64 * 2**30
"""Bytes of a process above which its shared pages are not inspected: the walk takes too long."""


@dataclass(slots=True)
class MemoryRecord:
    """Records the memory that one watchdog observes."""

    driver: int | None
    """Process id of the driver that the watchdog watches."""
    folder: Path | None = None
    """Log folder of the attempt; None: nothing is written."""
    _lines: list[str] = field(default_factory=list)
    _shared: dict[int, _Shared] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _last: str = ""
    """Line of the last sample."""
    _due: float = 0.0

    def sample(self, pids: Iterable[int]) -> None:
        """Sample the memory of these processes and the driver; write the record when due."""
        if self.folder is None:
            return
        everyone = [*pids, *([self.driver] if self.driver is not None else [])]
        sizes = {str(pid): size for pid in everyone if (size := resident_bytes(pid)) is not None}
        names = {pid: self._name(int(pid)) for pid in sizes}
        record = {
            "time": round(time.time(), 1),
            "oom_kills": oom_kills(),
            "resident_bytes": sizes,
            "peak_bytes": {pid: self._peak(int(pid), size) for pid, size in sizes.items()},
        }
        self._last = json.dumps({**record, "names": names})
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + INTERVAL_S
            self._write()

    def end(self) -> None:
        """Write the last sample and the kernel's current counts, after the driver ended."""
        if self._last:
            self._write()
            self._last = json.dumps({"time": round(time.time(), 1), "oom_kills": oom_kills()})
            self._write()

    def _write(self) -> None:
        assert self.folder is not None, "nowhere to write to"
        self._lines.append(self._last)
        file = self.folder / FILE
        with suppress(OSError):  # a full disk, or a run that was removed: it is only a record
            if len(self._lines) > MAX_LINES:
                self._lines = [self._lines[0], *self._lines[2::2]]
                file.write_text("\n".join(self._lines) + "\n", encoding="utf-8")
            else:
                with file.open("a", encoding="utf-8") as written:
                    written.write(self._last + "\n")

    def _peak(self, pid: int, resident: int) -> int:
        """Return the peak resident bytes, less the part of shared pages that is counted for other
        processes (a forked process shares most with its parent)."""
        peak = max(resident, _status_bytes(pid, "status", "VmHWM") or 0)
        known = self._shared.get(pid)
        if peak <= SHARED_CHECK_LIMIT and (
            known is None or peak > GROWTH_TO_RESAMPLE * known.peak_bytes
        ):
            own = _status_bytes(pid, "smaps_rollup", "Pss")
            known = self._shared[pid] = _Shared(peak, max(0, resident - (own or resident)))
        return peak - (known.others_bytes if known is not None else 0)

    def _name(self, pid: int) -> str:
        """Return a process's name: that of the log that it writes, or else its command."""
        if pid == self.driver:
            return "driver"
        if pid not in self._names and (log := self._log_of(pid)) is not None:
            self._names[pid] = log
        return self._names.get(pid) or _command(pid)

    def _log_of(self, pid: int) -> str | None:
        assert self.folder is not None, "no log without a folder"
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = Path(os.readlink(entry))
                    if target.suffix == ".log" and target.parent == self.folder:
                        return target.stem
        return None


@dataclass(frozen=True, slots=True)
class _Shared:
    """Caches how much of a process's memory was shared at its last inspection."""

    peak_bytes: int
    others_bytes: int
    """Part of the shared pages, resident at that inspection, that is counted for other
    processes."""


def _status_bytes(pid: int, file: str, name: str) -> int | None:
    """Read a line `name: NUMBER kB` of a process's file; None if the process has ended, or the line
    is missing."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def recorded_pids(folder: Path) -> set[int]:
    """Return the processes of the run in this folder's record, from any watchdog."""
    pids = set[int]()
    with suppress(OSError):
        for line in read_lines(folder / FILE):
            with suppress(ValueError, AttributeError):  # torn
                pids.update(map(int, parse_json(line).get("resident_bytes", {})))
    return pids


def resident_bytes(pid: int) -> int | None:
    """Return the resident bytes of a process, shared pages included; None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def peak_resident_bytes() -> int:
    """Return the peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def last_sample(folder: Path) -> dict[str, int]:
    """Map process names to their bytes at the last sample; empty without one. Reads only the end of
    the record."""
    samples = (one for one in last_records(folder / FILE) if one.get("resident_bytes"))
    return sizes_by_name(next(samples, {"resident_bytes": {}}))


def has_sizes(record: Mapping[str, Any]) -> bool:
    """Return True if a line of the record has sizes, and all its fields have the right type."""
    time_s, names = record.get("time"), record.get("names", {})
    sizes = [record.get(of, {}) for of in ("resident_bytes", "peak_bytes")]
    return (
        bool(record.get("resident_bytes"))
        and isinstance(time_s, int | float)
        and 0 <= time_s < _LATEST_S
        and isinstance(names, dict)
        and all(isinstance(of, dict) for of in sizes)
        and all(isinstance(size, int) and 0 <= size < 2**63 for of in sizes for size in of.values())
    )


_LATEST_S = 1e11
"""Seconds since 1970; a later time is invalid."""


def sizes_by_name(sample: Mapping[str, Any], *, of: str = "resident_bytes") -> dict[str, int]:
    """Map process names to bytes in one line of the record; equal names add up. `of` is
    resident_bytes or peak_bytes."""
    names, sizes = sample.get("names", {}), dict[str, int]()
    for pid, size in sample.get(of, {}).items():
        name = str(names.get(pid, pid))
        sizes[name] = sizes.get(name, 0) + size
    return sizes


def _command(pid: int) -> str:
    """Return the name of a command: for `python -m a.b`, b."""
    process = Path(f"/proc/{pid}")
    with suppress(OSError):
        words = (process / "cmdline").read_text(errors="replace").split("\0")
        if Path(words[0]).name.startswith("python") and words[1:2] == ["-m"]:
            return words[2].rpartition(".")[2]
        return (process / "comm").read_text().strip()
    return "?"
