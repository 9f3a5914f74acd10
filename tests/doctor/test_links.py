"""Tests of links between devices, by outputs written after the vendors' tools and by bandwidths
planted."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from milescli.doctor.collective import Report
from milescli.doctor.finding import Status
from milescli.doctor.links import check_topology, judge_bandwidths, judge_collective
from milescli.platform import cuda
from milescli.platform.machine import parse_machine
from milescli.platform.probe import Accelerators, find_accelerators
from tests.platform.tools_on_paper import AMD, NVIDIA, ROCM, replay, text

PAIRS = list(combinations(range(4), 2))
NAMES = [f"{a}-{b}" for a, b in PAIRS]


@pytest.mark.parametrize(
    ("texts", "summary"),
    [
        (NVIDIA, "all 6 pairs over nvlink"),
        (AMD, "all 1 pairs over xgmi"),
        (ROCM, "all 1 pairs over xgmi"),
    ],
)
def test_devices_that_are_linked_as_they_should_be_are_ok(
    texts: dict[tuple[str, ...], str], summary: str, tmp_path: Path
) -> None:
    finding = check_topology(find_accelerators(replay(texts), root=tmp_path))[0]
    assert (finding.status, finding.what) == (Status.OK, summary)


def test_a_broken_link_is_named_with_its_pair(tmp_path: Path) -> None:
    broken = {**NVIDIA, cuda.TOPOLOGY: text("nvidia_topo_broken_link.txt")}
    finding = check_topology(find_accelerators(replay(broken), root=tmp_path))[0]
    assert (finding.status, finding.what) == (Status.WARN, "1 of 6 pairs have no nvlink")
    assert finding.why.startswith("0-1 SYS") and finding.fix[0].startswith("nvidia-smi nvlink")


def test_an_unknown_topology_is_a_warning(tmp_path: Path) -> None:
    finding = check_topology(
        find_accelerators(replay({cuda.QUERY: NVIDIA[cuda.QUERY]}), root=tmp_path)
    )[0]
    assert finding.status is Status.WARN and finding.fix == ["nvidia-smi topo -m"]


def test_cards_that_have_only_pcie_are_ok() -> None:
    devices = parse_machine("4xL40S").nodes[0].devices
    accelerators = Accelerators(
        kind="cuda",
        devices=devices,
        interconnect="pcie",
        links=dict.fromkeys(PAIRS, "PHB"),
        notes=[],
    )
    assert check_topology(accelerators)[0].status is Status.OK


@pytest.mark.parametrize("name", ["cpu", "1xH200"])
def test_without_two_devices_there_is_nothing_to_check(name: str) -> None:
    machine = parse_machine(name)
    findings = check_topology(
        Accelerators(kind=machine.kind, devices=machine.nodes[0].devices, notes=[])
    )
    assert findings[0].status is Status.SKIP and findings[0].why


def test_a_slow_pair_is_named() -> None:
    speeds = {**dict.fromkeys(NAMES, 350e9), "1-3": 30e9}
    finding = judge_bandwidths(speeds, [], device="NVIDIA H200")[0]
    assert (
        finding.status is Status.WARN
        and "slowest pair 1-3" in finding.what
        and "H200" in finding.why
    )
    assert (
        judge_bandwidths(dict.fromkeys(NAMES, 350e9), [], device="NVIDIA H200")[0].status
        is Status.OK
    )
    assert judge_bandwidths(speeds, [], device="Some Other Card")[0].status is Status.WARN


def test_a_card_on_pcie_is_not_held_to_the_nvlink_of_its_name() -> None:
    speeds = dict.fromkeys(NAMES, 40e9)
    assert judge_bandwidths(speeds, [], device="NVIDIA H100 PCIe")[0].status is Status.OK


def test_all_slow_pairs_are_named_the_slowest_first() -> None:
    speeds = {**dict.fromkeys(NAMES, 350e9), "1-3": 30e9, "0-2": 20e9}
    assert (
        "2 of 6 pairs are slow: 0-2, 1-3;"
        in judge_bandwidths(speeds, [], device="NVIDIA H200")[0].why
    )


@pytest.mark.parametrize("problem", ["2 ones add up to 3, not 2", ""])
def test_a_pair_that_breaks_or_hangs_is_named(problem: str) -> None:
    fine, broken = Report(step=""), Report(step="adding numbers of 1 and 3", problem=problem)
    findings = judge_collective(
        [fine, fine, fine, broken], backend="nccl", device="NVIDIA H200", seconds=30.0, no_access=[]
    )
    assert [finding.status for finding in findings] == [Status.FAIL, Status.SKIP]
    assert (
        findings[0].what == "nccl: adding numbers of 1 and 3 failed"
        and (problem or "did not finish within 30 s") in findings[0].why
    )


def test_a_whole_collective_reports_its_bandwidth_and_its_slow_pair() -> None:
    reports = [
        Report(step="", everyone=300e9, pairs={**dict.fromkeys(NAMES, 350e9), "1-3": 30e9}),
        *[Report(step="")] * 3,
    ]
    findings = judge_collective(
        reports, backend="rccl", device="NVIDIA H200", seconds=9.0, no_access=[]
    )
    assert [(finding.check, finding.status) for finding in findings] == [
        ("collective", Status.OK),
        ("links", Status.WARN),
    ]
    assert "rccl added numbers across 4 processes" in findings[0].what and "1-3" in findings[1].why


def test_pairs_without_peer_access_are_a_fail_with_another_channel() -> None:
    finding = judge_bandwidths(dict.fromkeys(NAMES, 20e9), ["0-1", "1-0"], device="NVIDIA L40S")[0]
    assert finding.status is Status.FAIL and "--set weights.channel=distributed" in finding.fix
