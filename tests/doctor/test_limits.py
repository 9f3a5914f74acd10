"""Tests of what a process may have: faults planted in files of a paper machine."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from milescli.core.units import GIB
from milescli.doctor.finding import Status
from milescli.doctor.limits import check_limits, check_memory, check_threads


@pytest.mark.parametrize(
    ("available", "status"), [(1 * GIB, Status.FAIL), (4 * GIB, Status.WARN), (16 * GIB, Status.OK)]
)
def test_too_little_memory_is_found(available: int, status: Status) -> None:
    assert check_memory(total_bytes=16 * GIB, available_bytes=available)[0].status is status


def _cgroup(root: Path, **files: int | str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    folder = root / "sys/fs/cgroup/pod"
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / name.replace("_", ".")).write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("limit", "used", "status"),
    [
        (512, 100, Status.FAIL),
        (1500, 100, Status.WARN),
        (32768, 100, Status.OK),
        ("max", 9, Status.OK),
    ],
)
def test_a_container_that_allows_few_threads_is_found(
    tmp_path: Path, limit: int | str, used: int, status: Status
) -> None:
    _cgroup(tmp_path, pids_max=limit, pids_current=used)
    finding = check_threads(root=tmp_path)[0]
    assert finding.status is status
    assert status is not Status.FAIL or (
        finding.what == "100 of 512 are in use" and "--pids-limit" in finding.fix[0]
    )


@pytest.mark.parametrize(
    ("soft", "hard", "status", "fix"),
    [
        (512, 65536, Status.FAIL, "ulimit -n 65536"),
        (1024, 524288, Status.WARN, "ulimit -n 524288"),
        (1024, resource.RLIM_INFINITY, Status.WARN, "ulimit -n 65536"),
        (1024, 4096, Status.WARN, "prlimit --pid $$ --nofile=65536:65536"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, Status.OK, ""),
    ],
)
def test_a_low_limit_of_open_files_is_found(soft: int, hard: int, status: Status, fix: str) -> None:
    finding = check_limits(soft=soft, hard=hard)[0]
    assert finding.status is status
    assert not fix or finding.fix[0].removeprefix("sudo ") == fix
