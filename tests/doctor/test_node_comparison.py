"""Tests of what nodes are to each other, with faults planted on paper; a real small cluster is
asked in tests/end_to_end/cluster."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from milescli.doctor.collective import Place, Report, pairs_of, run_all_steps
from milescli.doctor.finding import Status
from milescli.doctor.node_comparison import (
    judge_clocks,
    judge_interfaces,
    judge_nodes,
    judge_versions,
)

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"
MINE = {"python": "3.11.7", "ray": "2.60.0"}
GOOD = Report(
    step="",
    everyone=9e8,
    pairs={f"{A}-{B}": 1e9, f"{A}-{C}": 1e9, f"{B}-{C}": 1e9},
    offsets={B: (0.001, 0.002), C: (0, 0.1)},
)


def test_nodes_with_the_same_versions_are_one_line_and_another_one_is_named() -> None:
    assert judge_versions(MINE, {A: MINE, B: MINE}, address="a:1")[0].what.startswith(
        "identical on 2 nodes: python 3.11.7"
    )
    findings = judge_versions(MINE, {A: MINE, B: {**MINE, "ray": "2.40.0"}}, address="a:1")
    assert [(finding.status, finding.node, finding.why) for finding in findings] == [
        (Status.FAIL, B, "ray is 2.40.0, and 2.60.0 here")
    ]


@pytest.mark.parametrize(
    ("offset", "error", "status"),
    [
        (0.4, 0.001, Status.OK),
        (-2.0, 0.1, Status.WARN),
        (2.0, 1.5, Status.OK),
        (4000.0, 0.1, Status.FAIL),
    ],
)
def test_a_clock_is_blamed_only_for_what_its_measurement_surely_shows(
    offset: float, error: float, status: Status
) -> None:
    finding = judge_clocks([A, B], Report(offsets={B: (offset, error)}))[0]
    assert finding.status is status
    assert status is Status.OK or (
        finding.node == B and ("behind" if offset < 0 else "ahead") in finding.what
    )


def test_the_interface_that_holds_the_address_must_be_the_one_that_variables_choose() -> None:
    held = {A: {A: "eth0", "127.0.0.1": "lo"}, B: {B: "eth0"}}
    assert judge_interfaces(held, {A: {}, B: {}}, {})[0].what == f"{A} eth0, {B} eth0"
    findings = judge_interfaces(held, {A: {}, B: {"NCCL_SOCKET_IFNAME": "ib0"}}, {})
    assert [(finding.status, finding.node) for finding in findings] == [(Status.WARN, B)]
    assert findings[0].fix[0].startswith("export NCCL_SOCKET_IFNAME=eth0")
    assert judge_interfaces({A: {"10.9.9.9": "eth0"}}, {A: {}}, {})[0].status is Status.FAIL


def test_nodes_that_add_numbers_are_ok_and_a_slow_pair_is_named() -> None:
    findings = judge_nodes([A, B, C], [GOOD] * 3, backend="gloo")
    assert [(finding.check, finding.status) for finding in findings] == [
        ("reach", Status.OK),
        ("clocks", Status.OK),
        ("group", Status.OK),
    ]
    slow = replace(GOOD, pairs={**GOOD.pairs, f"{B}-{C}": 1e8})
    assert f"slow: {B}-{C}" in judge_nodes([A, B, C], [slow] * 3, backend="gloo")[2].why


def test_a_node_that_another_cannot_reach_is_named_with_both_ends() -> None:
    blind = Report(
        step="reaching each other", unreachable=[(B, C, "timed out")], offsets=GOOD.offsets
    )
    findings = judge_nodes([A, B, C], [blind] * 3, backend="gloo")
    assert (findings[0].check, findings[0].status, findings[0].node, findings[0].what) == (
        "reach",
        Status.FAIL,
        B,
        f"{C} cannot be reached",
    )
    assert [finding.status for finding in findings[1:]] == [Status.SKIP, Status.OK]


def test_a_node_that_does_not_come_and_a_pair_that_breaks_are_named() -> None:
    late = Report(problem=f"{B} did not come to {A}:20000 within 60 s")
    findings = judge_nodes([A, B], [late, late], backend="gloo")
    assert (findings[0].check, findings[0].status) == ("reach", Status.FAIL) and B in findings[
        0
    ].why
    broken = replace(GOOD, step=f"adding numbers of {B} and {C}", problem="connection reset")
    findings = judge_nodes([A, B, C], [GOOD, broken, GOOD], backend="nccl")
    assert findings[-1].status is Status.FAIL and f"{B} and {C} failed" in findings[-1].what


def test_of_many_nodes_neighbours_are_paired() -> None:
    assert len(pairs_of(8)) == 28 and len(pairs_of(100)) == 100 and (0, 99) in pairs_of(100)


def test_a_clock_that_is_ahead_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that meet in this process, up to where they would add numbers; the second's clock is 5 s
    ahead."""
    from milescli.doctor import collective
    from milescli.platform.ports import free_ports

    monkeypatch.setattr(collective, "_run_all_reduces", lambda *_: None)
    meeting, reports = ("127.0.0.1", free_ports(1)[0]), {}

    def part(rank: int) -> None:
        place = Place(
            rank=rank, names=[A, B], addresses=["127.0.0.1"] * 2, meeting=meeting, backend="gloo"
        )
        reports[rank] = run_all_steps(place, clock=lambda: time.time() + 5.0 * rank)

    threads = [threading.Thread(target=part, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    offset, error = reports[0].offsets[B]
    assert abs(offset - 5.0) <= error + 0.01, reports
    assert judge_clocks([A, B], reports[0])[0].status is Status.WARN
