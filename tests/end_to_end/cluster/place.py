"""A driver that places a plan on the nodes of a cluster while a neighbour holds some devices, and
prints as JSON what Ray gave: run on a node by test_placement. `ADDRESS LOG_DIR PYTHONPATH`."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from milescli.backends.ray.cluster import Cluster
from milescli.backends.ray.each_node import joined
from milescli.backends.ray.nodes import ClusterNode, living_nodes
from milescli.core.errors import FitError
from milescli.plan.types import Plan, Slot
from milescli.platform.environment import trainer_environment
from tests.backends.ray.test_cluster import TOY
from tests.plans import PLAN

VARIABLES = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")


@ray.remote(num_gpus=2, num_cpus=0)
class Neighbour:
    """Somebody else's actor, which holds two devices of the first node."""

    def ids(self) -> list[int]:
        """Of its devices."""
        return [int(number) for number in ray.get_gpu_ids()]


def _cluster(address: str, nodes: list[ClusterNode], python_path: str) -> Cluster:
    environment = {"PYTHONPATH": python_path} if python_path else {}
    return Cluster(
        address=address,
        nodes=nodes,
        temp_dir=Path("/tmp"),
        environment=environment,
    )


async def _seen_by(slot: Slot, cluster: Cluster, plan: Plan, devices: list[list[str]]) -> list[str]:
    """[address, variables of an actor on this slot]"""
    own = [devices[slot.node][slot.device]]
    toy = await cluster.spawn(
        f"toy {slot.trainer_rank}",
        TOY,
        node=slot.node,
        num_gpus=0.45,
        kwargs={"number": 1},
        environment=trainer_environment(plan, own, {"GLOO_SOCKET_IFNAME": "eth0"}),
    )
    await toy.start(timeout_s=60)
    values = [await toy.run("environment", name, timeout_s=120) for name in VARIABLES]
    return [toy.node.address, *values]


async def _refusal(cluster: Cluster, plan: Plan) -> str:
    try:
        await cluster.place(plan, timeout_s=2)
    except FitError as error:
        return str(error)
    return ""


async def main(address: str, log_dir: Path, python_path: str) -> None:
    """Four slots on two nodes, then four more that no device is left for."""
    slots = [Slot(node=index // 2, device=index % 2, trainer_rank=index) for index in range(4)]
    plan = replace(PLAN, device_kind="cuda", slots=slots)
    with joined(address):
        nodes = living_nodes()
    cluster = _cluster(address, nodes, python_path)
    cluster.start(plan)
    cluster.log_dir = log_dir
    on_first = NodeAffinitySchedulingStrategy(node_id=nodes[0].node_id, soft=False)
    neighbour = Neighbour.options(scheduling_strategy=on_first).remote()
    taken = await neighbour.ids.remote()
    await cluster.place(plan, timeout_s=60)
    devices = await cluster.devices(plan, timeout_s=60)
    seen = [await _seen_by(slot, cluster, plan, devices) for slot in slots]
    refused = await _refusal(_cluster(address, nodes, ""), plan)
    print(json.dumps({"taken": taken, "devices": devices, "seen": seen, "refused": refused}))
    cluster.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
