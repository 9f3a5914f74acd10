"""Implements `miles doctor` on a Ray cluster: runs the checks of one computer on every node, then
those between the nodes. Names a node that does not answer, without delaying the others."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from milescli.backends.ray.each_node import NodeResult, joined, run_on_each_node
from milescli.backends.ray.nodes import free_resources, lost_nodes
from milescli.cluster.nodes import RunNode, probe_shared_folder
from milescli.cluster.report import NODE_REPORT, NodeReport, node_report
from milescli.core.errors import MilesError
from milescli.doctor.collective import PLACE_VARIABLE, Place, Report
from milescli.doctor.finding import Finding, Status, fail, failed, ok, run_checks, skip, warn
from milescli.doctor.fixes import nearest_folder
from milescli.doctor.network import list_interfaces
from milescli.doctor.node import heavy_at_once, node_checks, this_machine, trial_checks
from milescli.doctor.node_comparison import judge_interfaces, judge_nodes, judge_versions
from milescli.doctor.trial import run_trial

ANSWER_TIMEOUT_S, CHECKS_TIMEOUT_S, COLLECTIVE_TIMEOUT_S = 120.0, 900.0, 300.0
"""Time limits of a short question, of all checks of a node, and of the collective."""
CHECK_NODE = "milescli.doctor.cluster:check_node"
JOIN_COLLECTIVE = "milescli.doctor.cluster:join_collective"
FREE_PORTS = "milescli.platform.ports:free_ports"


def cluster_findings(address: str, *, runs_dir: Path, with_trials: bool = True) -> list[Finding]:
    """Check the cluster at `address`, which this process joins and leaves again. `with_trials` True
    also starts real engines there."""
    try:
        with joined(address):
            return _all_findings(address, runs_dir.absolute(), with_trials)
    except MilesError as error:
        return failed("cluster", error)


def check_node(*, runs_dir: str, nodes: list[str], with_trials: bool) -> list[Finding]:
    """Run the checks of one computer; called on every node. `nodes` are the addresses of all nodes,
    including its own."""
    machine = this_machine(os.environ)
    addresses = {address for interface in list_interfaces() for address in interface.addresses}
    own = next((address for address in nodes if address in addresses), "127.0.0.1")
    checks = node_checks(
        runs_dir=Path(runs_dir), machine=machine, loaded=None, environ=os.environ, address=own
    )
    trials = trial_checks(machine=machine, environ=os.environ, own_ray=False) if with_trials else []
    return run_checks([*checks, *trials], heavy_at_once=heavy_at_once())


def join_collective(
    *, place: dict[str, object], kind: str, settings: dict[str, str]
) -> list[Finding]:
    """Take part in the collective over all nodes; called on every node."""
    return run_trial(
        "nodes",
        device_kind=kind,
        timeout_s=COLLECTIVE_TIMEOUT_S,
        settings={**settings, PLACE_VARIABLE: json.dumps(place)},
    )


def _all_findings(address: str, runs_dir: Path, with_trials: bool) -> list[Finding]:
    answers = run_on_each_node(address, NODE_REPORT, timeout_s=ANSWER_TIMEOUT_S)
    nodes = {answer.node.address: answer for answer in answers if answer.error is None}
    findings = [
        *_membership_findings(address, answers),
        *_missing_node_findings("cluster", answers),
    ]
    findings += judge_versions(
        node_report().versions,
        {name: _report(answer).versions for name, answer in nodes.items()},
        address=address,
    )
    odd = {
        finding.node
        for finding in findings
        if finding.check == "versions" and finding.status is Status.FAIL
    }
    alike = {name: answer for name, answer in nodes.items() if name not in odd}
    arguments = {"runs_dir": str(runs_dir), "nodes": list(alike), "with_trials": with_trials}
    examined = run_on_each_node(
        address, CHECK_NODE, arguments, timeout_s=CHECKS_TIMEOUT_S, only=_node_ids(alike)
    )
    for answer in examined:
        address_of_node = answer.node.address
        findings += [replace(finding, node=address_of_node) for finding in answer.result or []]
    return [
        *findings,
        *_missing_node_findings("node", examined),
        *_joint_findings(address, alike, runs_dir),
    ]


def _joint_findings(address: str, nodes: Mapping[str, NodeResult], runs_dir: Path) -> list[Finding]:
    """Check the nodes together: interfaces, the shared disk, a collective."""
    if len(nodes) < 2:
        return skip("shared disk", "there is one node") + skip("group", "there is one node")
    interfaces = {name: _report(answer).interfaces for name, answer in nodes.items()}
    variables = {name: _report(answer).variables for name, answer in nodes.items()}
    findings = judge_interfaces(interfaces, variables, os.environ)
    shared = _shared_disk_findings(address, nodes, runs_dir)
    if any(finding.status is Status.FAIL for finding in findings):
        return [*findings, *shared, *skip("group", "see `interfaces` first")]
    return [*findings, *shared, *_collective_findings(address, nodes)]


def _membership_findings(address: str, answers: Sequence[NodeResult]) -> list[Finding]:
    """Report which nodes exist, which were lost, and how many GPUs other programs hold."""
    nodes = [answer.node for answer in answers]
    free = sum(resources.get("GPU", 0.0) for resources in free_resources().values())
    gpus = sum(node.num_gpus for node in nodes)
    devices = f"; {free:g} of {gpus} GPUs are free" if gpus else ""
    names = ", ".join(f"{node.address} ({node.host_name})" for node in nodes)
    findings = ok("cluster", f"{len(nodes)} nodes at {address}: {names}{devices}")
    for lost in lost_nodes():
        why = "Ray has lost it; a run would do without it"
        fix = f"ssh {lost.address} ray start --address={address}   # to add it again"
        what = f"{lost} was lost"
        findings += warn("cluster", what, why=why, fix=fix, node=lost.address)
    if free < gpus:
        why = "a run waits for them, or uses fewer"
        findings += warn(
            "cluster",
            f"other jobs use {gpus - free:g} of {gpus} GPUs",
            why=why,
            fix=f"ray status --address={address}",
        )
    return findings


def _missing_node_findings(check: str, answers: Sequence[NodeResult]) -> list[Finding]:
    """Return a finding for each node that did not answer or that failed."""
    return [
        finding
        for answer in answers
        if answer.error is not None
        for finding in failed(check, answer.error, node=answer.node.address)
    ]


def _shared_disk_findings(
    address: str, nodes: Mapping[str, NodeResult], runs_dir: Path
) -> list[Finding]:
    """Check that every node can read a file that is written here."""
    folder = nearest_folder(runs_dir)
    try:
        answers = probe_shared_folder(folder, address, only=_node_ids(nodes))
    except OSError as error:
        return skip("shared disk", f"{folder} is not writable here ({error.strerror}); see `disk`")
    findings = _missing_node_findings("shared disk", answers)
    for answer in answers:
        if answer.error is None and not answer.result:
            why = (
                f"a file written to {folder} here does not appear there, but the logs and "
                "checkpoints of all ranks go into it"
            )
            fixes = [
                "--set run.dir=FOLDER   # on a file system that all nodes share",
                f"ssh {answer.node.address} mount SHARE {folder}",
            ]
            what = f"{folder} is another folder there"
            findings += fail("shared disk", what, why=why, fix=fixes, node=answer.node.address)
    return findings or ok("shared disk", f"{folder} is shared by {len(answers)} nodes")


def _collective_findings(address: str, nodes: Mapping[str, NodeResult]) -> list[Finding]:
    """Run a collective over all nodes, which meet at the first of them."""
    names = list(nodes)
    members = [RunNode(node=answer.node, report=_report(answer)) for answer in nodes.values()]
    first = members[0].node.node_id
    arguments = {"count": 1, "host": names[0]}
    port = run_on_each_node(
        address, FREE_PORTS, arguments, timeout_s=ANSWER_TIMEOUT_S, only=[first]
    )[0]
    if port.error is not None:
        return _missing_node_findings("group", [port])
    has_devices = all(member.report.machine.kind != "cpu" for member in members)
    backend: Literal["nccl", "gloo"] = "nccl" if has_devices else "gloo"

    def seat(rank: int) -> NodeResult:
        member = members[rank]
        place = Place(
            rank=rank,
            names=names,
            addresses=names,
            meeting=(names[0], port.result[0]),
            backend=backend,
            device=0 if has_devices else None,
        )
        kwargs = {
            "place": asdict(place),
            "kind": member.report.machine.kind,
            "settings": member.interface_variables(os.environ),
        }
        return run_on_each_node(
            address,
            JOIN_COLLECTIVE,
            kwargs,
            timeout_s=COLLECTIVE_TIMEOUT_S + ANSWER_TIMEOUT_S,
            only=[member.node.node_id],
        )[0]

    with ThreadPoolExecutor(max_workers=len(names)) as pool:
        answers = list(pool.map(seat, range(len(names))))
    if silent := _missing_node_findings("group", answers):
        return silent
    return judge_nodes(names, [_read(answer.result[0]) for answer in answers], backend=backend)


def _read(finding: Finding) -> Report:
    if finding.status is not Status.OK:
        return Report(problem=finding.why)
    raw = json.loads(finding.what)
    return Report(**{**raw, "unreachable": [tuple(pair) for pair in raw["unreachable"]]})


def _report(answer: NodeResult) -> NodeReport:
    assert isinstance(answer.result, NodeReport), answer
    return answer.result


def _node_ids(nodes: Mapping[str, NodeResult]) -> list[str]:
    return [answer.node.node_id for answer in nodes.values()]
