"""Compares the nodes of a cluster: versions, interfaces, reachability, clocks, bandwidth. Pure;
`cluster` queries the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from milescli.core.units import format_bytes
from milescli.doctor.collective import Report, first_broken
from milescli.doctor.finding import Finding, fail, ok, skip, warn
from milescli.doctor.network import GLOO_VARIABLE, NCCL_VARIABLE, gloo_choice, nccl_choice

CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 300.0
"""Differences of clocks, in seconds, for a warning and for a failure. Events of several nodes are
ordered by their time stamps, and steps take seconds. Kerberos (five minutes by default), and with
it some shared file systems, refuse a clock that differs more."""
SLOW_SHARE = 0.5
"""Fraction of the median pair below which a pair counts as slow."""
SETTLE = (
    "a firewall, a wrong route, or an address of another network: every port between nodes must "
    "be open"
)


def judge_versions(
    mine: Mapping[str, str], theirs: Mapping[str, Mapping[str, str]], *, address: str
) -> list[Finding]:
    """Compare each node's versions (`theirs`) with the driver's (`mine`). All must be equal,
    because nodes communicate in formats that differ between versions."""
    findings: list[Finding] = []
    for node, versions in theirs.items():
        unlike = {
            name: versions.get(name, "missing")
            for name in mine
            if versions.get(name, "missing") != mine[name]
        }
        if unlike:
            why = "; ".join(
                f"{name} is {version}, and {mine[name]} here" for name, version in unlike.items()
            )
            fix = (
                f"ssh {node}   # ray stop; install the same versions there; ray start "
                f"--address={address} from that environment"
            )
            what = "runs different software than the driver"
            findings += fail("versions", what, why=why, fix=fix, node=node)
    listed = ", ".join(f"{name} {version}" for name, version in mine.items())
    return findings or ok("versions", f"identical on {len(theirs)} nodes: {listed}")


def judge_interfaces(
    interfaces: Mapping[str, Mapping[str, str]],
    variables: Mapping[str, Mapping[str, str]],
    environ: Mapping[str, str],
) -> list[Finding]:
    """Check that each node has the address that Ray uses for it, and that no variable selects
    another network. `interfaces` maps a node to its addresses and their interfaces, `variables` a
    node to its environment; `environ` is the driver's environment."""
    findings: list[Finding] = []
    for node, addresses in interfaces.items():
        own = addresses.get(node)
        if own is None:
            why = (
                f"Ray tells the others to use {node}, but the node itself has "
                f"{', '.join(sorted(addresses))}: ranks could not listen there"
            )
            fix = (
                f"ssh {node}   # ray stop; ray start --node-ip-address=ADDRESS ..., with an "
                "address that the node has"
            )
            what = f"no interface has the address {node}"
            findings += fail("interfaces", what, why=why, fix=fix, node=node)
            continue
        for name, choose in ((NCCL_VARIABLE, nccl_choice), (GLOO_VARIABLE, gloo_choice)):
            value = variables[node].get(name) or environ.get(name)
            if value and not choose(value, [own]):
                why = (
                    f"{own} has {node}, the address that the others use for it; {name} excludes it"
                )
                fixes = [
                    f"export {name}={own}   # before `ray start` there, or before miles",
                    f"unset {name}",
                ]
                what = f"{name}={value} selects another network"
                findings += warn("interfaces", what, why=why, fix=fixes, node=node)
    return findings or ok(
        "interfaces",
        ", ".join(f"{node} {addresses[node]}" for node, addresses in interfaces.items()),
    )


def judge_nodes(names: Sequence[str], reports: Sequence[Report], *, backend: str) -> list[Finding]:
    """Return the findings `reach`, `clocks` and `group` of all nodes, [rank] each."""
    unreachable = sorted({pair for report in reports for pair in report.unreachable})
    if unreachable:
        findings: list[Finding] = []
        for a, b, why in unreachable:
            fixes = [f"ssh {a} ping -c 1 {b}", f"ssh {b} iptables -L INPUT -n   # what is let in"]
            what, why = f"{b} cannot be reached", f"{why}; {SETTLE}"
            findings += fail("reach", what, why=why, fix=fixes, node=a)
        return findings + skip("group", "see `reach` first") + judge_clocks(names, reports[0])
    broken = first_broken(reports)
    if broken is not None and broken.step in ("starting", "meeting", "reaching each other"):
        why = f"{broken.problem or 'no answer'}; {SETTLE}"
        fix = f"ssh {names[0]} iptables -L INPUT -n   # which connections are allowed?"
        return fail("reach", f"{broken.step} failed", why=why, fix=fix) + skip(
            "group", "see `reach` first"
        )
    return [
        *ok("reach", f"{len(names)} nodes can reach each other"),
        *judge_clocks(names, reports[0]),
        *_group(reports, broken, backend),
    ]


def judge_clocks(names: Sequence[str], report: Report) -> list[Finding]:
    """Compare each node's clock with that of the first node, within its error bound."""
    if len(report.offsets) < len(names) - 1:
        return skip("clocks", "see `reach` first")
    findings: list[Finding] = []
    for node, (offset_s, error_s) in report.offsets.items():
        surely_s = max(0.0, abs(offset_s) - error_s)
        what = (
            f"its clock is {abs(offset_s):.3g} s {'ahead of' if offset_s > 0 else 'behind'} that "
            f"of {names[0]}, to within {error_s:.1g} s"
        )
        fix = f"ssh {node} sudo chronyc makestep   # or: systemctl restart systemd-timesyncd"
        if surely_s > CLOCK_FAIL_S:
            why = (
                "tickets and certificates may be rejected, and logs of the run cannot be sorted "
                "by time"
            )
            findings += fail("clocks", what, why=why, fix=fix, node=node)
        elif surely_s > CLOCK_WARN_S:
            why = (
                "events and logs of the run are sorted by their time stamps, and would be in "
                "the wrong order"
            )
            findings += warn("clocks", what, why=why, fix=fix, node=node)
    worst = max((abs(offset) + error for offset, error in report.offsets.values()), default=0.0)
    return findings or ok("clocks", f"within {worst * 1000:.2g} ms of {names[0]}")


def _group(reports: Sequence[Report], broken: Report | None, backend: str) -> list[Finding]:
    trace = (
        "GLOO_LOG_LEVEL=DEBUG miles doctor" if backend == "gloo" else "NCCL_DEBUG=INFO miles doctor"
    )
    if broken is not None:
        why = broken.problem or "it did not finish in time, or its process was killed"
        return fail(
            "group",
            f"{backend}: {broken.step} failed",
            why=why,
            fix=["miles doctor   # see `interfaces`", trace],
        )
    pairs = reports[0].pairs
    if not pairs:
        return ok("group", "one node")
    slowest, usual = min(pairs, key=lambda pair: pairs[pair]), median(pairs.values())
    summary = (
        f"{backend} added numbers across {len(reports)} nodes, "
        f"{format_bytes(reports[0].everyone)}/s of bus bandwidth; slowest pair {slowest}: "
        f"{format_bytes(pairs[slowest])}/s"
    )
    slow = [pair for pair in pairs if pairs[pair] < SLOW_SHARE * usual]
    if slow:
        why = (
            f"the median of {len(pairs)} pairs is {format_bytes(usual)}/s, and a step waits for "
            f"the slowest one; slow: {', '.join(slow[:6])}"
        )
        return warn(
            "group",
            summary,
            why=why,
            fix=["ethtool DEVICE | grep Speed   # on both nodes", trace],
        )
    return ok("group", summary)
