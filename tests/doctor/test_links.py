"""Tests of links between devices, by outputs written after the vendors' tools and by bandwidths
planted."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from milescli.doctor.collective import Report
from milescli.doctor.finding import Status
from milescli.doctor.links import (
    LINK_BYTES_PER_S,
    check_topology,
    judge_bandwidths,
    judge_collective,
)
from milescli.platform import cuda
from milescli.platform.machine import DEVICE_MODELS, parse_machine
from milescli.platform.probe import Accelerators, find_accelerators
from tests.platform.tools_on_paper import AMD, NVIDIA, ROCM, replay, text

PAIRS = list(combinations(range(4), 2))
NAMES = [f"{a}-{b}" for a, b in PAIRS]


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (NVIDIA, "all 6 pairs over nvlink"),
        (AMD, "all 1 pairs over xgmi"),
        (ROCM, "all 1 pairs over xgmi"),
    ],
)
def test_devices_that_are_linked_as_they_should_be_are_ok(
    texts: dict[tuple[str, ...], str], told: str, tmp_path: Path
) -> None:
    found = check_topology(find_accelerators(replay(texts), root=tmp_path))[0]
    assert (found.status, found.what) == (Status.OK, told)


def test_a_broken_link_is_named_with_its_pair(tmp_path: Path) -> None:
    broken = {**NVIDIA, cuda.TOPOLOGY: text("nvidia_topo_broken_link.txt")}
    found = check_topology(find_accelerators(replay(broken), root=tmp_path))[0]
    assert (found.status, found.what) == (Status.WARN, "1 of 6 pairs have no nvlink")
    assert found.why.startswith("0-1 SYS") and found.fix[0].startswith("nvidia-smi nvlink")


def test_a_topology_that_is_not_told_is_a_warning(tmp_path: Path) -> None:
    found = check_topology(
        find_accelerators(replay({cuda.QUERY: NVIDIA[cuda.QUERY]}), root=tmp_path)
    )[0]
    assert found.status is Status.WARN and found.fix == ["nvidia-smi topo -m"]


def test_cards_that_have_only_pcie_are_ok() -> None:
    devices = parse_machine("4xL40S").nodes[0].devices
    found = Accelerators(
        kind="cuda",
        devices=devices,
        interconnect="pcie",
        links=dict.fromkeys(PAIRS, "PHB"),
        notes=[],
    )
    assert check_topology(found)[0].status is Status.OK


@pytest.mark.parametrize("name", ["cpu", "1xH200"])
def test_without_two_devices_there_is_nothing_to_check(name: str) -> None:
    machine = parse_machine(name)
    found = check_topology(
        Accelerators(kind=machine.kind, devices=machine.nodes[0].devices, notes=[])
    )
    assert found[0].status is Status.SKIP and found[0].why


def test_a_slow_pair_is_named() -> None:
    speeds = {**dict.fromkeys(NAMES, 350e9), "1-3": 30e9}
    found = judge_bandwidths(speeds, [], device="NVIDIA H200")[0]
    assert found.status is Status.WARN and "slowest pair 1-3" in found.what and "H200" in found.why
    assert (
        judge_bandwidths(dict.fromkeys(NAMES, 350e9), [], device="NVIDIA H200")[0].status
        is Status.OK
    )
    assert judge_bandwidths(speeds, [], device="Some Other Card")[0].status is Status.WARN


def test_all_slow_pairs_are_named_the_slowest_first() -> None:
    speeds = {**dict.fromkeys(NAMES, 350e9), "1-3": 30e9, "0-2": 20e9}
    assert (
        "2 of 6 pairs are slow: 0-2, 1-3;"
        in judge_bandwidths(speeds, [], device="NVIDIA H200")[0].why
    )


@pytest.mark.parametrize("problem", ["2 ones made 3, not 2", ""])
def test_a_pair_that_breaks_or_hangs_is_named(problem: str) -> None:
    fine, broken = Report(step=""), Report(step="adding numbers of 1 and 3", problem=problem)
    found = judge_collective(
        [fine, fine, fine, broken], backend="nccl", device="NVIDIA H200", seconds=30.0, no_access=[]
    )
    assert [each.status for each in found] == [Status.FAIL, Status.SKIP]
    assert (
        found[0].what == "nccl: adding numbers of 1 and 3 failed"
        and (problem or "did not end within 30 s") in found[0].why
    )


def test_a_whole_collective_tells_its_bandwidth_and_its_slow_pair() -> None:
    reports = [
        Report(step="", everyone=300e9, pairs={**dict.fromkeys(NAMES, 350e9), "1-3": 30e9}),
        *[Report(step="")] * 3,
    ]
    found = judge_collective(
        reports, backend="rccl", device="NVIDIA H200", seconds=9.0, no_access=[]
    )
    assert [(each.check, each.status) for each in found] == [
        ("collective", Status.OK),
        ("links", Status.WARN),
    ]
    assert "rccl added numbers over 4 processes" in found[0].what and "1-3" in found[1].why


def test_pairs_without_peer_access_are_a_fail_with_another_channel() -> None:
    found = judge_bandwidths(dict.fromkeys(NAMES, 20e9), ["0-1", "1-0"], device="NVIDIA L40S")[0]
    assert found.status is Status.FAIL and "--set weights.channel=distributed" in found.fix


def test_every_model_that_has_a_link_has_its_speed() -> None:
    assert set(LINK_BYTES_PER_S) == {
        name.partition("-")[0]
        for name, model in DEVICE_MODELS.items()
        if model.interconnect != "pcie"
    }
