"""Tests of torch against the vendors' tools. What torch says is written by hand here, but for this
machine's own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from milescli.doctor.finding import Status
from milescli.doctor.torch_build import judge_torch
from milescli.platform.machine import Machine, parse_machine

CUDA = replace(parse_machine("2xH200"), driver_version="580.65.06", runtime_version="13.0")
ROCM = replace(parse_machine("2xMI300X"), driver_version="6.12.12", runtime_version="7.2.0-43")
A100 = {"name": "x", "arch": "sm_80", "memory_bytes": 2**40}


def _seen(machine: Machine, **changes: Any) -> dict[str, Any]:
    devices = [
        {"name": d.name, "arch": d.arch, "memory_bytes": d.memory_bytes}
        for d in machine.nodes[0].devices
    ]
    own = {"cuda": "13.0", "hip": None, "archs": ["sm_80", "sm_90", "sm_100"]}
    if machine.kind == "rocm":
        own = {"cuda": None, "hip": "7.2.26015", "archs": ["gfx90a", "gfx942", "gfx950"]}
    return {"version": "2.13.0", **own, "devices": devices, "problem": "", **changes}


@pytest.mark.parametrize("machine", [CUDA, ROCM])
def test_torch_that_agrees_is_ok(machine: Machine) -> None:
    findings = judge_torch(_seen(machine), machine)
    assert [(finding.check, finding.status) for finding in findings] == [
        ("torch", Status.OK),
        ("driver", Status.OK),
    ], findings


@pytest.mark.parametrize(
    ("machine", "changes", "why", "fix"),
    [
        (CUDA, {"cuda": None, "archs": []}, "built for cpu", "docker/install.sh .venv cuda"),
        (ROCM, {"hip": None, "cuda": "13.0"}, "built for cuda", "docker/install.sh .venv rocm"),
        (CUDA, {"devices": []}, "shows 2 devices, torch shows 0", "ls -l /dev/nvidia*"),
        (CUDA, {"problem": "CUDA error: ECC"}, "CUDA error: ECC", "ls -l /dev/nvidia*"),
        (CUDA, {"archs": ["sm_100"]}, "the devices are sm_90", "docker/install.sh .venv cuda"),
        (ROCM, {"archs": ["gfx90a"]}, "the devices are gfx942", "docker/install.sh .venv rocm"),
        (CUDA, {"devices": [A100] * 2}, "numbered differently", "export CUDA_DEVICE_ORDER"),
    ],
)
def test_torch_that_disagrees_is_a_fail(
    machine: Machine, changes: dict[str, Any], why: str, fix: str
) -> None:
    finding = judge_torch(_seen(machine, **changes), machine)[0]
    assert (finding.check, finding.status) == ("torch", Status.FAIL)
    assert why in finding.why and finding.fix[0].startswith(fix)


def test_a_partition_of_a_device_is_a_warning() -> None:
    less = [{"name": "x", "arch": "sm_90", "memory_bytes": 2**33}] * 2
    assert judge_torch(_seen(CUDA, devices=less), CUDA)[0].status is Status.WARN


def test_code_of_an_older_minor_version_and_ptx_run_on_a_newer_device() -> None:
    b300 = replace(parse_machine("1xB300"), driver_version="580.1")
    assert judge_torch(_seen(b300, archs=["sm_90", "sm_100"]), b300)[0].status is Status.OK
    assert judge_torch(_seen(b300, archs=["sm_90", "compute_90"]), b300)[0].status is Status.OK
    assert judge_torch(_seen(b300, archs=["sm_90"]), b300)[0].status is Status.FAIL


@pytest.mark.parametrize(
    ("machine", "changes", "status"),
    [
        (replace(CUDA, driver_version="535.104"), {}, Status.FAIL),
        (replace(CUDA, driver_version="535.104"), {"cuda": "12.8"}, Status.OK),
        (replace(CUDA, driver_version=""), {}, Status.OK),
        (replace(ROCM, runtime_version="6.2.1"), {}, Status.FAIL),
        (replace(ROCM, runtime_version="6.4.3"), {}, Status.WARN),
        (replace(ROCM, runtime_version=""), {}, Status.OK),
    ],
)
def test_a_driver_that_is_too_old_is_found(
    machine: Machine, changes: dict[str, Any], status: Status
) -> None:
    finding = judge_torch(_seen(machine, **changes), machine)[-1]
    assert (finding.check, finding.status) == ("driver", status)


def test_this_machine_is_described() -> None:
    # in a process of its own, as doctor does: a trainer on a CPU has changed torch in this one
    ask = "import json; from milescli.doctor.torch_build import describe_torch as describe"
    command = [sys.executable, "-c", f"{ask}; print(json.dumps(describe()))"]
    seen = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=400).stdout)
    assert seen["version"] and seen["problem"] == ""
    assert judge_torch(seen, parse_machine("cpu"))[0].status is Status.OK
