"""Reads cores, memory and shared memory of this computer, within affinity and cgroup limits, from
/proc and /sys; starts nothing."""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""(limit, use) of a cgroup, version 2 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Describes this computer as far as this process may use it."""

    cpu_cores: int
    """Physical cores; at least 1."""
    memory_bytes: int
    available_bytes: int
    """Part of `memory_bytes` that is available now."""
    shm_bytes: int
    num_numa_nodes: int


def read_host(*, root: Path = Path("/"), cpus: Collection[int] | None = None) -> HostFacts:
    """Describe this computer and its CPU affinity for this process. `root` and `cpus` (usable
    logical CPUs) are for tests."""
    usable = set(cpus) if cpus is not None else os.sched_getaffinity(0)
    groups = cgroup_folders(root)
    cores = _physical_cores(root, usable)
    quota = _cpu_quota(groups)
    memory = min([_meminfo(root, "MemTotal") or 0, *_memory_limits(groups)])
    return HostFacts(
        cpu_cores=max(1, min(cores, int(quota)) if quota is not None else cores),
        memory_bytes=memory,
        available_bytes=min(memory, available_memory(root=root)),
        shm_bytes=_shm(root),
        num_numa_nodes=_numa_nodes(root),
    )


def _physical_cores(root: Path, usable: Collection[int]) -> int:
    """Count distinct sets of hyper-thread siblings; a CPU without this entry counts as a core."""
    siblings = {
        _text(root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        or f"alone {number}"
        for number in usable
    }
    return len(siblings)


def available_memory(*, root: Path = Path("/")) -> int:
    """Return the bytes that are still available: the smaller of MemAvailable and what a cgroup's
    limit leaves, without page cache; 0 if the computer reports neither."""
    bounds = [*_memory_left(cgroup_folders(root))]
    if (of_computer := _meminfo(root, "MemAvailable")) is not None:
        bounds.append(of_computer)
    return min(bounds, default=0)


def _memory_left(groups: list[Path]) -> Iterator[int]:
    for group in groups:
        for limit_name, used_name in _MEMORY_FILES:
            limit, used = number_in(group / limit_name), number_in(group / used_name)
            if limit is not None and used is not None:
                yield max(0, limit - used + _stat(group / "memory.stat", "inactive_file"))


def _stat(path: Path, name: str) -> int:
    words = [line.split() for line in (_text(path) or "").splitlines()]
    return next((int(pair[1]) for pair in words if len(pair) == 2 and pair[0] == name), 0)


def _meminfo(root: Path, name: str) -> int | None:
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _shm(root: Path) -> int:
    try:
        stats = os.statvfs(root / "dev/shm")
    except OSError:
        return 0
    return stats.f_blocks * stats.f_frsize


def _numa_nodes(root: Path) -> int:
    folder = root / "sys/devices/system/node"
    return max(1, len(list(folder.glob("node[0-9]*"))))


def cgroup_folders(root: Path) -> list[Path]:
    """Return the folders of the cgroup of this process and its parents, of version 2 and of the cpu
    and memory trees of version 1."""
    folders: list[Path] = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, name = line.split(":", 2)
        names = (
            [tree for tree in controllers.split(",") if tree in ("cpu", "memory", "pids")]
            if controllers
            else ["", "unified"]
        )
        for tree in names:
            base = root / "sys/fs/cgroup" / tree
            inner = PurePosixPath(name).relative_to("/")
            folders += [base / inner, *(base / parent for parent in inner.parents)]
    return folders


def threads_left(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return (number that may still be started, limit) of each cgroup that limits threads, and of
    `ulimit -u`, which counts all threads of a user other than root."""
    bounds = []
    for group in cgroup_folders(root):
        limit, used = number_in(group / "pids.max"), number_in(group / "pids.current")
        if limit is not None and used is not None:
            bounds.append((limit - used, limit))
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() != 0 and limit != resource.RLIM_INFINITY:
        bounds.append((limit - _threads_of_user(root), limit))
    return bounds


def _threads_of_user(root: Path) -> int:
    count = 0
    for process in (root / "proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended while we looked
            if process.stat().st_uid == os.geteuid():
                count += sum(1 for _ in (process / "task").iterdir())
    return count


def _cpu_quota(groups: list[Path]) -> float | None:
    """Return the smallest number of CPUs that any group allows."""
    quotas = []
    for group in groups:
        quota, _, period = (_text(group / "cpu.max") or "").partition(" ")
        quota, period = (
            quota or _text(group / "cpu.cfs_quota_us") or "",
            period or _text(group / "cpu.cfs_period_us") or "",
        )
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory_limits(groups: list[Path]) -> list[int]:
    numbers = (number_in(group / name) for group in groups for name, _ in _MEMORY_FILES)
    return [number for number in numbers if number is not None]


def number_in(path: Path) -> int | None:
    """Return the number in a cgroup's file; None if the file is missing or says `max`."""
    text = _text(path) or ""
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
