"""Tests of cores and memory, with cgroup limits planted in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.units import GIB
from milescli.platform.cpu import HostFacts, read_host


def _plant(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def _computer(root: Path, *, num_cpus: int = 8) -> Path:
    """Four cores of two threads each, 16 GiB, two NUMA nodes."""
    (root / "dev/shm").mkdir(parents=True)
    for cpu in range(num_cpus):
        siblings = sorted({cpu % 4, cpu % 4 + 4})
        _plant(
            root,
            **{
                f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": ",".join(
                    map(str, siblings)
                )
            },
        )
    for node in range(2):
        _plant(root, **{f"sys/devices/system/node/node{node}/cpulist": "0-3"})
    return _plant(
        root,
        **{
            "proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n",
            "proc/self/cgroup": "0::/box/inner\n",
        },
    )


def _read(root: Path, cpus: range | set[int] = range(8)) -> HostFacts:
    return read_host(root=root, cpus=cpus)


def test_hyper_threads_are_not_cores(tmp_path: Path) -> None:
    facts = _read(_computer(tmp_path))
    assert (facts.cpu_cores, facts.memory_bytes, facts.num_numa_nodes) == (4, 16 * 1024**3, 2)
    assert facts.shm_bytes > 0


def test_affinity_is_taken_off(tmp_path: Path) -> None:
    assert _read(_computer(tmp_path), {1, 5, 2}).cpu_cores == 2


@pytest.mark.parametrize(
    ("where", "quota"), [("box/inner", "200000 100000"), ("box", "250000 100000")]
)
def test_a_quota_of_ours_or_of_a_group_around_us_is_taken_off(
    tmp_path: Path, where: str, quota: str
) -> None:
    root = _plant(
        _computer(tmp_path),
        **{f"sys/fs/cgroup/{where}/cpu.max": quota, "sys/fs/cgroup/box/memory.max": str(1024**3)},
    )
    assert (_read(root).cpu_cores, _read(root).memory_bytes) == (2, 1024**3)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    root = _plant(
        _computer(tmp_path),
        **{"sys/fs/cgroup/box/cpu.max": "max 100000", "sys/fs/cgroup/box/memory.max": "max"},
    )
    assert (_read(root).cpu_cores, _read(root).memory_bytes) == (4, 16 * 1024**3)


def test_less_than_one_cpu_is_still_one_core(tmp_path: Path) -> None:
    assert (
        _read(
            _plant(_computer(tmp_path), **{"sys/fs/cgroup/box/cpu.max": "50000 100000"})
        ).cpu_cores
        == 1
    )


def test_what_can_be_had_is_what_the_computer_and_the_cgroups_leave(tmp_path: Path) -> None:
    root = _plant(
        _computer(tmp_path),
        **{"proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 9437184 kB\n"},
    )
    assert _read(root).available_bytes == 9 * GIB
    group = "sys/fs/cgroup/box/memory"
    _plant(root, **{f"{group}.max": str(8 * GIB), f"{group}.current": str(7 * GIB)})
    _plant(root, **{f"{group}.stat": f"anon 1\ninactive_file {2 * GIB}\n"})
    facts = _read(root)
    assert (facts.memory_bytes, facts.available_bytes) == (8 * GIB, 3 * GIB), "but for page cache"


def test_limits_of_cgroups_version_1_are_taken_off(tmp_path: Path) -> None:
    root = _plant(
        _computer(tmp_path),
        **{
            "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "4294967296",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
        },
    )
    assert (_read(root).cpu_cores, _read(root).memory_bytes) == (3, 4 * 1024**3)


def test_a_computer_that_tells_nothing_has_the_cpus_we_may_use(tmp_path: Path) -> None:
    assert _read(tmp_path) == HostFacts(
        cpu_cores=8, memory_bytes=0, available_bytes=0, shm_bytes=0, num_numa_nodes=1
    )


def test_this_computer_can_be_read() -> None:
    facts = read_host()
    assert facts.cpu_cores >= 1 and facts.memory_bytes > 2**28
