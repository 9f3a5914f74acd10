"""How findings are shown: one table, then why and what to do where it matters. What nodes of a
cluster have in common is one row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from milescli.console.output import Output
from milescli.doctor.finding import Finding, Status

MOST_NAMES = 4
"""Nodes named in one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """Findings of one check that say the same."""

    finding: Finding
    """The first of them."""
    nodes: list[str]
    """Where; empty: this machine, or the cluster as a whole."""
    is_everywhere: bool
    """On every node that answered this check."""

    @property
    def where(self) -> str:
        """For people: empty where it does not matter."""
        if not self.nodes or (self.is_everywhere and len(self.nodes) == 1):
            return ", ".join(self.nodes)
        if self.is_everywhere:
            return f"all {len(self.nodes)}"
        more = len(self.nodes) - MOST_NAMES
        return ", ".join(self.nodes[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def fold(findings: Sequence[Finding]) -> list[TableRow]:
    """One row for equal findings of several nodes, numbers in an `ok` aside; in the order of the
    checks."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    places = {finding.check: place for place, finding in reversed(list(enumerate(findings)))}
    for finding in sorted(findings, key=lambda finding: places[finding.check]):
        groups.setdefault(_likeness(finding), []).append(finding)
    answered = {
        finding.check: {one.node for one in findings if one.check == finding.check}
        for finding in findings
    }
    rows = []
    for group in groups.values():
        nodes = sorted({finding.node for finding in group if finding.node})
        everywhere = bool(nodes) and set(nodes) == answered[group[0].check]
        rows.append(TableRow(finding=group[0], nodes=nodes, is_everywhere=everywhere))
    return rows


def show_findings(findings: Sequence[Finding], output: Output) -> None:
    """The table, the warnings with their fixes, the verdict."""
    rows = fold(findings)
    if any(row.nodes for row in rows):
        cells = [
            (row.finding.check, row.where or "-", row.finding.status.value, row.finding.what)
            for row in rows
        ]
        output.table(["check", "node", "status", "found"], cells)
    else:
        output.table(
            ["check", "status", "found"],
            [(r.finding.check, r.finding.status.value, r.finding.what) for r in rows],
        )
    for row in rows:
        finding, where = (
            row.finding,
            f" on {row.where}" if row.nodes and not row.is_everywhere else "",
        )
        if finding.status is Status.OK:
            continue
        lines = [
            f"{finding.check}{where}: {finding.why}",
            *(f"  fix: {fix}" for fix in finding.fix),
        ]
        output.note("\n".join(lines)) if finding.status is Status.SKIP else output.warn(
            "\n".join(lines)
        )
    counts = Counter(row.finding.status for row in rows)
    if counts[Status.FAIL]:
        output.note(
            f"not ready: {counts[Status.FAIL]} failed, {counts[Status.WARN]} with a warning"
        )
    else:
        output.success(
            f"ready: {counts[Status.OK]} checks passed, {counts[Status.WARN]} with a warning"
        )


def _likeness(finding: Finding) -> tuple[object, ...]:
    """What must be equal for one row. Free bytes and seconds differ from node to node, and do
    not matter where all is well."""
    what = (
        re.sub(r"\d+(\.\d+)*( [KMGT]iB| m)?", "#", finding.what)
        if finding.status is Status.OK
        else finding.what
    )
    return finding.check, finding.status, what, finding.why, tuple(finding.fix)
