"""Which nodes of a cluster a run takes, and why it refuses some: differ in software or devices, too
few, too small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from milescli.backends.ray.each_node import NodeResult
from milescli.backends.ray.nodes import ClusterNode
from milescli.cluster import nodes as module
from milescli.cluster.nodes import RunNodes, choose_nodes
from milescli.cluster.report import NodeReport, node_report
from milescli.core.errors import FitError, MachineError, WaitTimeout
from milescli.platform.machine import parse_machine
from milescli.recipe.machine import MachineSettings

Cluster = Callable[..., None]


def _answer(
    number: int,
    machine: str,
    *,
    is_driver: bool = False,
    num_gpus: int | None = None,
    **versions: str,
) -> NodeResult:
    there = parse_machine(machine)
    gpus = len(there.nodes[0].devices) if num_gpus is None else num_gpus
    node = ClusterNode(
        node_id=f"id{number}",
        address=f"10.0.0.{number}",
        host_name=f"host-{number}",
        is_driver=is_driver,
        num_gpus=gpus,
    )
    report = NodeReport(
        machine=there,
        versions=node_report().versions | versions,
        interfaces={f"10.0.0.{number}": f"eth{number}"},
        variables={},
    )
    return NodeResult(node=node, result=report)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Plant what the nodes of a cluster answer, and what is free on them by their id (all, where
    nothing is said)."""

    def plant(*given: NodeResult, free: dict[str, float] | None = None) -> None:
        from contextlib import nullcontext

        all_free = {answer.node.node_id: float(answer.node.num_gpus) for answer in given}
        monkeypatch.setattr(module, "joined", lambda address: nullcontext())
        monkeypatch.setattr(module, "run_on_each_node", lambda *_, **__: list(given))
        monkeypatch.setattr(
            module,
            "free_resources",
            lambda: {name: {"GPU": count} for name, count in (all_free | (free or {})).items()},
        )

    return plant


def _choose(**settings: object) -> RunNodes:
    return choose_nodes(MachineSettings(address="10.0.0.1:6379", **settings))


def test_the_wanted_nodes_are_taken_in_order_and_the_plan_is_made_for_the_weakest(answers) -> None:
    weak = _answer(2, "8xH200")
    weak = replace(
        weak,
        result=replace(weak.result, machine=parse_machine("4xH200")),
        node=replace(weak.node, num_gpus=4),
    )
    answers(_answer(1, "8xH200", is_driver=True), weak, _answer(3, "8xH200"))
    taken = _choose(nodes=2)
    assert [member.node.address for member in taken.chosen] == ["10.0.0.1", "10.0.0.2"]
    assert [len(node.devices) for node in taken.machine.nodes] == [4, 4]
    assert taken.spans_computers


def test_a_head_without_devices_and_nodes_that_are_taken_are_passed_over(answers) -> None:
    answers(
        _answer(1, "cpu", is_driver=True),
        _answer(2, "8xH200"),
        _answer(3, "8xH200"),
        _answer(4, "8xH200"),
        free={"id2": 3.0},
    )
    assert [member.node.address for member in _choose(nodes=2).chosen] == ["10.0.0.3", "10.0.0.4"]
    assert [member.node.address for member in _choose(nodes=2, gpus=0).chosen] == [
        "10.0.0.1",
        "10.0.0.2",
    ]


def test_devices_that_ray_does_not_count_are_not_there(answers) -> None:
    answers(_answer(1, "8xH200", is_driver=True, num_gpus=2))
    assert len(_choose().machine.nodes[0].devices) == 2
    with pytest.raises(
        FitError, match=r"4 GPUs per node are requested, but node 10.0.0.1 \(host-1\) has 2"
    ) as caught:
        _choose(gpus=4)
    assert "--gpus 2" in caught.value.fixes


def test_too_few_nodes_are_named_with_those_that_did_not_answer(answers) -> None:
    late = NodeResult(
        node=_answer(2, "cpu").node,
        error=WaitTimeout("node 10.0.0.2 did not answer", why="hung", fix="ray status"),
    )
    answers(_answer(1, "cpu", is_driver=True), late)
    with pytest.raises(
        MachineError,
        match=r"2 nodes are requested, but the Ray cluster at 10\.0\.0\.1:6379 has only 1",
    ) as caught:
        _choose(nodes=2)
    assert "node 10.0.0.2 did not answer" in caught.value.why


@pytest.mark.parametrize("package", ["miles", "torch", "sglang", "megatron-core", "ray", "python"])
def test_another_version_on_a_node_is_named(answers, package: str) -> None:
    answers(_answer(1, "cpu", is_driver=True), _answer(2, "cpu", **{package: "0.0.1"}))
    with pytest.raises(
        MachineError, match=r"node 10.0.0.2 \(host-2\) runs different software"
    ) as caught:
        _choose(nodes=2)
    assert (
        f"{package} is 0.0.1 there and {node_report().versions[package]} here" in caught.value.why
    )
    assert [member.node.address for member in _choose().chosen] == ["10.0.0.1"], (
        "a node that is not taken does not matter"
    )


def test_differ_devices_are_refused(answers) -> None:
    answers(_answer(1, "8xH200", is_driver=True), _answer(2, "8xH100"))
    with pytest.raises(MachineError, match="differ") as caught:
        _choose(nodes=2)
    assert "NVIDIA H200" in caught.value.why and "NVIDIA H100 80GB HBM3" in caught.value.why


def test_the_interface_is_that_of_the_address_unless_the_user_named_one(answers) -> None:
    answers(_answer(1, "cpu", is_driver=True), _answer(2, "cpu"))
    member = _choose(nodes=2).chosen[1]
    both = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert member.interface_variables({}) == dict.fromkeys(both, "eth2")
    assert member.interface_variables({"NCCL_SOCKET_IFNAME": "ib0"}) == {
        "GLOO_SOCKET_IFNAME": "eth2",
        "NCCL_SOCKET_IFNAME": "ib0",
    }
    there = replace(
        member, report=replace(member.report, variables={"NCCL_SOCKET_IFNAME": "bond0"})
    )
    assert there.interface_variables({"NCCL_SOCKET_IFNAME": "ib0"})["NCCL_SOCKET_IFNAME"] == "bond0"
