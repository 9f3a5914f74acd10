"""Tests of variables and of Ray's age."""

from __future__ import annotations

import resource
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from milescli.backends.sglang.launch.kernels import Kernels
from milescli.core.pins import pin
from milescli.core.units import GIB
from milescli.doctor.finding import Status
from milescli.doctor.settings import (
    check_kernels,
    check_limits,
    check_memory,
    check_pins,
    check_python,
    check_ray_version,
    check_threads,
    check_variables,
    requirements,
)
from milescli.doctor.tiny_trainer import tiny_plan
from milescli.platform.machine import parse_machine


@pytest.mark.parametrize(
    ("version", "status"), [("2.47.1", Status.FAIL), ("2.48.0", Status.OK), ("2.60.0", Status.OK)]
)
def test_an_old_ray_is_a_fail_with_what_it_does_to_amd_devices(
    version: str, status: Status
) -> None:
    finding = check_ray_version(kind="rocm", version_of=lambda _: version)[0]
    assert finding.status is status
    assert status is Status.OK or (
        "HIP_VISIBLE_DEVICES" in finding.why
        and finding.fix == [f"{sys.executable} -m pip install 'ray[default]>=2.48'"]
    )


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", Status.FAIL),
        ("RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES", "1", Status.WARN),
        ("CUDA_LAUNCH_BLOCKING", "1", Status.WARN),
    ],
)
def test_a_variable_that_harms_is_found_and_its_command_mends_it(
    name: str, value: str, status: Status
) -> None:
    finding = check_variables(None, environ={name: value})[0]
    assert finding.status is status and f"{name}={value}" in finding.what
    assert finding.fix[0].startswith(f"unset {name}")
    assert check_variables(None, environ={})[0].status is Status.OK


def test_what_miles_will_replace_is_listed() -> None:
    finding = check_variables(
        tiny_plan("rocm"), environ={"NCCL_MIN_NCHANNELS": "16", "OMP_NUM_THREADS": "99"}
    )[0]
    assert finding.status is Status.WARN and finding.what == "NCCL_MIN_NCHANNELS=16 becomes 112"
    assert finding.fix == ["unset NCCL_MIN_NCHANNELS"]


H100 = parse_machine("H100")


@pytest.mark.parametrize(
    ("installed", "tested", "status", "fix"),
    [
        ("0.4.5", "0.4.5", Status.OK, ""),
        ("0.4.7", "0.4.5", Status.FAIL, "--no-deps sglang-kernel==0.4.5"),
        (None, "0.4.5", Status.FAIL, "--no-deps sglang-kernel==0.4.5"),
        ("0.4.6", None, Status.WARN, "miles doctor"),
    ],
)
def test_kernels_of_another_torch_are_named_with_those_that_fit(
    installed: str | None, tested: str | None, status: Status, fix: str
) -> None:
    there = Kernels(torch="2.11.0", installed=installed, tested=tested)
    finding, layers = check_kernels(H100, there=there, has_engine=False)
    assert finding.status is status and fix in "".join(finding.fix)
    assert layers.status is Status.OK and "TransformerEngine is not installed" in layers.what


def test_rocm_is_not_asked_for_them() -> None:
    (finding,) = check_kernels(parse_machine("MI300X"))
    assert finding.status is Status.SKIP


@pytest.mark.slow
def test_those_of_a_cpu_are_compiled_and_a_missing_compiler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (finding,) = check_kernels(parse_machine("cpu"))
    assert finding.status is Status.OK and str(tmp_path) in finding.what
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (finding,) = check_kernels(parse_machine("cpu"))
    assert finding.status is Status.WARN and "no C compiler" in finding.why
    assert "install gcc" in finding.fix[0]


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


WANTED = ["ray[default]>=2.48", "sglang==0.5.20", "torch==2.13.0", "pyarrow>=15"]
GOOD = {"ray": "2.60.0", "sglang": "0.5.20", "torch": "2.13.0+cpu", "pyarrow": "26.0.1"}


def _check(**changes: str | None):
    versions = {**GOOD, **changes}

    def version_of(name: str) -> str:
        version = versions[name]
        if version is None:
            raise PackageNotFoundError(name)
        return version

    return check_pins(wanted=WANTED, version_of=version_of)[0]


def test_versions_as_pinned_are_ok_whatever_their_build() -> None:
    assert _check().status is Status.OK


@pytest.mark.parametrize(
    ("name", "version", "why", "fix"),
    [
        ("ray", "2.40.0", "ray is 2.40.0, expected >=2.48", "pip install 'ray[default]>=2.48'"),
        (
            "sglang",
            "0.5.22",
            "sglang is 0.5.22, expected ==0.5.20",
            "pip install --no-deps sglang==0.5.20",
        ),
        ("torch", None, "torch is missing, expected ==2.13.0", "pip install torch==2.13.0"),
    ],
)
def test_a_wrong_or_missing_package_is_named_with_the_command_that_mends_it(
    name: str, version: str | None, why: str, fix: str
) -> None:
    finding = _check(**{name: version})
    assert (finding.status, finding.why, finding.fix) == (
        Status.FAIL,
        why,
        [f"{sys.executable} -m {fix}"],
    )


def test_torch_for_rocm_is_the_one_of_the_rocm_images() -> None:
    pinned = pin("torch_rocm")
    assert _check(torch=f"{pinned}+rocm7.2.4").status is Status.OK
    assert f"expected =={pinned}" in _check(torch="2.13.0+rocm7.2.4").why


def test_our_own_list_is_read_and_leaves_extras_out() -> None:
    names = [line.split(";")[0] for line in requirements()]
    assert any(name.startswith("sglang==") for name in names) and not any(
        name.startswith("pytest") for name in names
    )


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 10), Status.FAIL), ((3, 11), Status.OK), ((3, 12), Status.OK), ((3, 13), Status.FAIL)],
)
def test_python_from_3_11_to_3_12_is_taken(version: tuple[int, int], status: Status) -> None:
    assert check_python(version=version)[0].status is status
