"""Tests of folding findings of nodes: equal ones in one row, a node that differs by its name."""

from __future__ import annotations

import io
from dataclasses import replace

from milescli.console.output import Mode, Output
from milescli.doctor.finding import Finding, Status, fail, ok, skip
from milescli.doctor.run import merge_equal, show_findings

NODES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


def _on(node: str, findings: list[Finding]) -> list[Finding]:
    return [replace(finding, node=node) for finding in findings]


FINDINGS = [
    *_on(
        NODES[0],
        ok("memory", "22.7 GiB of 23.5 GiB free")
        + ok("shm", "4.0 GiB free")
        + skip("rdma", "none"),
    ),
    *_on(
        NODES[1],
        ok("memory", "22.6 GiB of 23.5 GiB free")
        + fail("shm", "64 MiB", why="y", fix="f")
        + skip("rdma", "none"),
    ),
    *_on(
        NODES[2],
        ok("memory", "900.0 MiB of 1.5 GiB free")
        + ok("shm", "4.1 GiB free")
        + skip("rdma", "none"),
    ),
    *ok("clocks", "within 1 ms"),
]


def test_what_is_equal_on_all_nodes_is_one_row_and_the_odd_one_is_named() -> None:
    rows = [(row.finding.check, row.finding.status, row.where) for row in merge_equal(FINDINGS)]
    assert rows == [
        ("memory", Status.OK, "all 3"),
        ("shm", Status.OK, "10.0.0.1, 10.0.0.3"),
        ("shm", Status.FAIL, "10.0.0.2"),
        ("rdma", Status.SKIP, "all 3"),
        ("clocks", Status.OK, ""),
    ]


def test_the_warning_names_the_node_and_the_counts_are_of_rows() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    show_findings(FINDINGS, Output(Mode.HUMAN, stdout=stdout, stderr=stderr))
    assert stdout.getvalue().splitlines()[0].split() == ["check", "node", "status", "found"]
    assert (
        "warning: shm on 10.0.0.2: y" in stderr.getvalue()
        and "not ready: 1 failed" in stderr.getvalue()
    )


def test_many_nodes_are_named_in_part() -> None:
    findings = [
        finding
        for number in range(9)
        for finding in _on(f"10.0.0.{number}", fail("shm", "small", why="y", fix="f"))
    ]
    assert (
        merge_equal([*findings, *_on("10.0.1.1", ok("shm", "fine"))])[0].where
        == "10.0.0.0, 10.0.0.1, 10.0.0.2, 10.0.0.3 and 5 more"
    )


def test_one_machine_alone_has_no_column_of_nodes() -> None:
    stdout = io.StringIO()
    show_findings(ok("shm", "fine"), Output(Mode.HUMAN, stdout=stdout, stderr=io.StringIO()))
    assert stdout.getvalue().splitlines()[0].split() == ["check", "status", "found"]
