"""Which computers a Ray cluster has lost. Asked by a process that has joined; `nodes` says who is
there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A computer that was part of the cluster, and has not come back under its address."""

    address: str
    host_name: str

    def __str__(self) -> str:
        return f"node {self.address} ({self.host_name})"


def lost_nodes() -> list[LostNode]:
    """Each once, by address."""
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
