"""The computers of a Ray cluster: which exist, what is free on them, and whether one has died.
Called in a process that has joined the cluster."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence
from dataclasses import dataclass

from milescli.core.errors import NodeDied


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """Describes a computer that left the cluster and has not returned under its address."""

    address: str
    host_name: str

    def __str__(self) -> str:
        return f"node {self.address} ({self.host_name})"


def lost_nodes() -> list[LostNode]:
    """Return each lost node once, by address."""
    import ray

    nodes = ray.nodes()
    there = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    gone = {
        node["NodeManagerAddress"]: node["NodeManagerHostname"]
        for node in nodes
        if not node["Alive"]
    }
    return [
        LostNode(address=address, host_name=name)
        for address, name in sorted(gone.items())
        if address not in there
    ]


DEATH_NOTICE_S = 45.0
"""Seconds that Ray may need to notice that a node is gone: it checks every 3 s, and gives up after
five failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """Describes one computer of a cluster, as Ray knows it."""

    node_id: str
    address: str
    """Address at which the other nodes reach it."""
    host_name: str
    is_driver: bool
    """True if this process runs there."""
    num_gpus: int = 0
    """Number of GPUs that Ray counts."""

    def __str__(self) -> str:
        return f"node {self.address} ({self.host_name})"


def living_nodes() -> list[ClusterNode]:
    """Return the living nodes of the cluster that this process is in: the driver's first, then by
    address."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    nodes = [
        ClusterNode(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            host_name=node["NodeManagerHostname"],
            is_driver=node["NodeID"] == own,
            num_gpus=int(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(
        nodes,
        key=lambda node: (not node.is_driver, ipaddress.ip_address(node.address), node.node_id),
    )


def free_resources() -> dict[str, dict[str, float]]:
    """Return node id -> resources that Ray has not assigned there (`GPU`, `CPU`), for the cluster
    that this process is in."""
    from ray._private.state import available_resources_per_node

    return available_resources_per_node()


def find_dead(nodes: Sequence[ClusterNode], *, within_s: float = 0.0) -> ClusterNode | None:
    """Return the first of the nodes that Ray considers dead, now or within `within_s`; None if
    there is none. Blocks."""
    import ray

    deadline = time.monotonic() + within_s
    while True:
        gone = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
        dead = next((node for node in nodes if node.node_id in gone), None)
        if dead is not None or time.monotonic() >= deadline:
            return dead
        time.sleep(0.5)


def node_died(node: ClusterNode, why: str) -> NodeDied:
    """Return the error that names the dead node."""
    return NodeDied(
        f"{node} died",
        why=f"Ray lost contact with it; {why}",
        fix="ray status   # is it back, or has another node joined?",
    )
