"""Cores, memory and shared memory of this computer, with affinity and cgroup limits taken off.
Reads /proc and /sys; starts nothing."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """This computer, as far as this process may use it."""

    cpu_cores: int
    """Physical cores; at least 1."""
    memory_bytes: int
    shm_bytes: int
    num_numa_nodes: int


def read_host(*, root: Path = Path("/"), cpus: Collection[int] | None = None) -> HostFacts:
    """`root` and `cpus` (logical CPUs that may be used) are for tests; by default this computer and
    our own affinity."""
    usable = set(cpus) if cpus is not None else os.sched_getaffinity(0)
    groups = cgroup_folders(root)
    cores = _physical_cores(root, usable)
    quota = _cpu_quota(groups)
    memory = _meminfo(root)
    limit = _memory_limit(groups)
    return HostFacts(
        cpu_cores=max(1, min(cores, int(quota)) if quota is not None else cores),
        memory_bytes=min(memory, limit) if limit is not None else memory,
        shm_bytes=_shm(root),
        num_numa_nodes=_numa_nodes(root),
    )


def _physical_cores(root: Path, usable: Collection[int]) -> int:
    """Distinct sets of hyper-thread siblings; a CPU without this entry counts as a core."""
    siblings = {
        _text(root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        or f"alone {number}"
        for number in usable
    }
    return len(siblings)


def _meminfo(root: Path) -> int:
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


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
    """Folders of our cgroup and of those around it, version 2 and the cpu and memory trees of
    version 1."""
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


def _cpu_quota(groups: list[Path]) -> float | None:
    """The smallest number of CPUs that any group allows."""
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


def _memory_limit(groups: list[Path]) -> int | None:
    limits = [
        _text(group / name) for group in groups for name in ("memory.max", "memory.limit_in_bytes")
    ]
    numbers = [int(limit) for limit in limits if limit and limit.isdigit()]  # `max` means: no limit
    return min(numbers, default=None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
