"""Tests of the checks of the computer, each with its fault planted."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from milescli.core.units import GIB, MIB
from milescli.doctor.finding import Status
from milescli.doctor.host import (
    NUM_PORTS,
    check_platform,
    check_ports,
    check_shm,
    check_visibility,
)
from milescli.platform.machine import Machine, Node, parse_machine
from milescli.platform.ports import free_ports
from milescli.platform.probe import Accelerators


def test_the_platform_is_shown_with_its_oddities() -> None:
    assert "8 x NVIDIA H200 (sm_90), nvlink" in check_platform(parse_machine("8xH200"))[0].what
    odd = Machine(
        kind="cpu",
        nodes=[Node(cpu_cores=1, memory_bytes=1, shm_bytes=1)],
        notes=["`nvidia-smi` ended with 9"],
    )
    finding = check_platform(odd)[0]
    assert (finding.status, finding.why) == (Status.WARN, "`nvidia-smi` ended with 9")


def test_every_contradiction_of_visibility_is_a_fail() -> None:
    machine = parse_machine("2xMI300X")
    findings = check_visibility(
        Accelerators(kind="rocm", devices=machine.nodes[0].devices, notes=[]),
        environ={
            "ROCR_VISIBLE_DEVICES": "0",
            "HIP_VISIBLE_DEVICES": "0",
            "CUDA_VISIBLE_DEVICES": "1",
        },
    )
    assert [(finding.status, finding.fix) for finding in findings] == [
        (Status.FAIL, ["unset ROCR_VISIBLE_DEVICES"]),
        (Status.FAIL, ["unset CUDA_VISIBLE_DEVICES"]),
    ]


def test_a_contradiction_is_reported_on_a_cpu_too_and_its_command_mends_it() -> None:
    none = Accelerators(kind="cpu", devices=[], notes=[])
    environ = {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}
    finding = check_visibility(none, environ=environ)[0]
    assert (finding.status, finding.fix) == (Status.WARN, ["unset CUDA_VISIBLE_DEVICES"])
    assert check_visibility(none, environ={"HIP_VISIBLE_DEVICES": "0"})[0].status is Status.OK


@pytest.mark.parametrize(
    ("free", "status"), [(64 * MIB, Status.FAIL), (GIB, Status.WARN), (8 * GIB, Status.OK)]
)
def test_a_small_or_full_shared_memory_is_found(free: int, status: Status) -> None:
    finding = check_shm(size_bytes=max(free, 64 * MIB), free_bytes=free)[0]
    assert finding.status is status
    assert finding.status is Status.OK or "mount -o remount,size=" in finding.fix[0]


def test_free_ports_are_found() -> None:
    finding = check_ports()[0]
    assert finding.status is Status.OK and "none is fixed" in finding.what


def test_a_single_taken_port_is_named_and_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        candidates = [held.getsockname()[1], *free_ports(NUM_PORTS)]
        finding = check_ports(candidates=candidates)[0]
    assert finding.status is Status.OK
    assert "; 1 is in use and skipped, by " in finding.what
    assert f"(pid {os.getpid()})" in finding.what


def test_taken_ports_are_a_fail_that_names_who_holds_them_and_its_command_mends_it() -> None:
    code = (
        "import socket, sys, time; s = [socket.create_server(('127.0.0.1', 0)) for _ in range(17)];"
        "print(*[each.getsockname()[1] for each in s], flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            ports = [int(word) for word in holder.stdout.readline().split()]
            finding = check_ports(candidates=ports)[0]
            assert finding.status is Status.FAIL and finding.what.startswith("0 of 16 ports")
            assert f"(pid {holder.pid}) holds 17" in finding.why and finding.fix[0].startswith(
                f"kill {holder.pid} "
            )
            subprocess.run(finding.fix[0], shell=True, check=True, timeout=120)
            holder.wait(120)
            assert check_ports(candidates=ports)[0].status is Status.OK
        finally:
            holder.kill()


FAULTS = {
    "a small /dev/shm": (
        "mount -t tmpfs -o size=64M none /dev/shm",
        "from milescli.doctor.host import check_shm, shm_sizes; a, b = shm_sizes(); f = "
        "check_shm(size_bytes=a, free_bytes=b)",
        "mount -o remount",
    ),
    "no loopback": (
        "true",
        "from milescli.doctor.host import check_ports; f = check_ports()",
        "ip link set lo up",
    ),
    "few open files": (
        "ulimit -Sn 300",
        "from milescli.doctor.settings import check_limits; f = check_limits()",
        "ulimit -n",
    ),
    "a small scratch folder": (
        "mkdir $DIR/scratch; mount -t tmpfs -o size=1M none $DIR/scratch",
        "import os, pathlib; from milescli.doctor.disk import check_scratch; f = "
        "check_scratch(folder=pathlib.Path(os.environ['DIR'], 'scratch'))",
        "mount -o remount,size=",
    ),
    "a scratch folder that is read-only": (
        "mkdir $DIR/scratch; mount -t tmpfs -o ro,size=9G none $DIR/scratch",
        "import os, pathlib; from milescli.doctor.disk import check_scratch; f = "
        "check_scratch(folder=pathlib.Path(os.environ['DIR'], 'scratch'))",
        "mount -o remount,rw",
    ),
}
"""What plants it, what finds it, how the fix begins that mends it."""
SHOW = "print(f[0].status.value); print(*f[0].fix, sep=chr(10))"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_mended_by_the_printed_command(fault: str) -> None:
    """In namespaces of its own: nothing outside is changed."""
    if subprocess.run(["unshare", "-rnm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let us make namespaces")
    plant, find, begins = FAULTS[fault]
    script = f"""set -e
        {plant}
        look() {{ {sys.executable} -c "{find}; {SHOW}"; }}
        look > $DIR/before
        eval "$(grep '^{begins}' $DIR/before)"
        look > $DIR/after"""
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "-rnm", "bash", "-c", script]
        subprocess.run(
            command,
            check=True,
            timeout=200,
            env={**os.environ, "DIR": folder, "PYTHONPATH": os.getcwd()},
        )
        before, after = (
            (Path(folder) / name).read_text().splitlines() for name in ("before", "after")
        )
    assert (before[0], after[0]) == ("fail", "ok")
