"""Tests of the network's checks, with faults planted on paper machines; and that this machine can
be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.doctor.finding import Status
from milescli.doctor.network import (
    Interface,
    check_host_name,
    check_interfaces,
    check_rdma,
    list_interfaces,
)

NAMES = [
    Interface(name="docker0", is_up=True, addresses=("172.17.0.1",)),
    Interface(name="eth0", is_up=True, addresses=("10.0.0.5",)),
    Interface(name="eth1", is_up=False),
    Interface(name="lo", is_up=True, addresses=("127.0.0.1",)),
]


@pytest.mark.parametrize("value", ["eth0", "eth", "=eth0", "^lo,docker", "eth0,eth1"])
def test_names_that_nccl_would_find_are_ok(value: str) -> None:
    assert (
        check_interfaces(NAMES, environ={"NCCL_SOCKET_IFNAME": value}, kind="cuda")[0].status
        is Status.OK
    )


@pytest.mark.parametrize("value", ["ib0", "=eth", "eth1", "^eth,lo,docker"])
def test_a_name_that_is_not_there_or_down_is_a_fail_and_its_command_mends_it(value: str) -> None:
    finding = check_interfaces(NAMES, environ={"NCCL_SOCKET_IFNAME": value}, kind="rocm")[0]
    assert finding.status is Status.FAIL and f"NCCL_SOCKET_IFNAME={value}" in finding.what
    name, _, mended = finding.fix[0].removeprefix("export ").partition("=")
    assert check_interfaces(NAMES, environ={name: mended}, kind="rocm")[0].status is Status.OK
    assert (
        check_interfaces(NAMES, environ={"NCCL_SOCKET_IFNAME": value}, kind="cpu")[0].status
        is Status.WARN
    )


def test_gloo_takes_exact_names_only() -> None:
    assert (
        check_interfaces(NAMES, environ={"GLOO_SOCKET_IFNAME": "eth"}, kind="cpu")[0].status
        is Status.WARN
    )
    assert (
        check_interfaces(NAMES, environ={"GLOO_SOCKET_IFNAME": "eth0"}, kind="cpu")[0].status
        is Status.OK
    )


def test_a_machine_without_loopback_is_a_fail() -> None:
    assert check_interfaces(NAMES[:3], environ={}, kind="cpu")[0].fix == ["ip link set lo up"]


def test_a_proxy_that_takes_loopback_is_a_warning_without_its_password() -> None:
    environ = {"http_proxy": "http://me:hunter2@proxy:3128"}
    finding = check_interfaces(NAMES, environ=environ, kind="cpu")[0]
    assert finding.status is Status.WARN and "hunter2" not in f"{finding}"
    mended = {**environ, "no_proxy": ",127.0.0.1,localhost"}
    assert check_interfaces(NAMES, environ=mended, kind="cpu")[0].status is Status.OK


def test_several_faults_are_reported_at_once() -> None:
    environ = {
        "NCCL_SOCKET_IFNAME": "ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
        "https_proxy": "http://proxy:3128",
    }
    assert len(check_interfaces(NAMES[:3], environ=environ, kind="cuda")) == 4


def test_an_own_name_that_leads_nowhere_is_a_warning() -> None:
    def resolve(name: str) -> str:
        raise OSError("Name or service not known")

    finding = check_host_name(name="node7", resolve=resolve)[0]
    assert finding.status is Status.WARN and finding.fix[0].startswith("echo '127.0.0.1 node7' | ")


def _rdma(root: Path, **states: str) -> None:
    for name, state in states.items():
        port = root / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")


def test_rdma_ports_are_read_with_limits_and_variables(tmp_path: Path) -> None:
    assert check_rdma(root=tmp_path, environ={})[0].status is Status.SKIP
    _rdma(tmp_path, mlx5_0="4: ACTIVE", mlx5_1="4: ACTIVE")
    finding = check_rdma(root=tmp_path, environ={}, memlock=-1)[0]
    assert finding.status is Status.OK and "mlx5_0:1 400 Gb/s" in finding.what
    low = check_rdma(root=tmp_path, environ={}, memlock=65536)[0]
    assert (low.status, low.fix[0]) == (Status.FAIL, "ulimit -l unlimited")
    assert check_rdma(root=tmp_path, environ={"NCCL_IB_HCA": "mlx5_9"}, memlock=-1)[0].fix == [
        "unset NCCL_IB_HCA"
    ]
    assert (
        check_rdma(root=tmp_path, environ={"NCCL_IB_HCA": "mlx5"}, memlock=-1)[0].status
        is Status.OK
    )
    assert check_rdma(root=tmp_path, environ={"NCCL_IB_DISABLE": "1"}, memlock=-1)[0].fix == [
        "unset NCCL_IB_DISABLE"
    ]
    _rdma(tmp_path, mlx5_2="1: DOWN")
    assert "mlx5_2:1 DOWN" in check_rdma(root=tmp_path, environ={}, memlock=-1)[0].why


def test_interfaces_of_this_machine_are_read() -> None:
    assert any(interface.name == "lo" for interface in list_interfaces())
