"""Where Ray puts a plan: each of its nodes on the node that was chosen, with the devices that Ray
gave away, whoever has the others."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from tests.cluster_in_small import SmallCluster

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

PLACE = textwrap.dedent(
    """
    import asyncio, json, sys, tempfile
    from dataclasses import replace
    from pathlib import Path
    import ray
    from milescli.backends.ray.cluster import Cluster
    from milescli.backends.ray.everywhere import joined
    from milescli.backends.ray.nodes import living_nodes
    from milescli.core.errors import FitError
    from milescli.plan.types import Slot
    from milescli.platform.environment import trainer_environment
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    from tests.backends.ray.test_cluster import PLAN, TOY

    slots = [Slot(node=index // 2, device=index % 2, trainer_rank=index) for index in range(4)]
    plan = replace(PLAN, device_kind="cuda", slots=slots)

    @ray.remote(num_gpus=2, num_cpus=0)
    class Neighbour:
        def ids(self):
            return [int(each) for each in ray.get_gpu_ids()]

    async def main(nodes):
        cluster = Cluster(address=sys.argv[1], nodes=nodes, temp_dir=Path("/tmp"), log_dir=Path(sys.argv[2]), environment={"PYTHONPATH": sys.argv[3]})
        cluster.start(plan)
        theirs = Neighbour.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=nodes[0].node_id, soft=False)).remote()
        taken = await theirs.ids.remote()
        await cluster.place(plan, timeout_s=60)
        devices = await cluster.devices(plan, timeout_s=60)
        seen = []
        for slot in slots:
            environment = trainer_environment(plan, [devices[slot.node][slot.device]], {"GLOO_SOCKET_IFNAME": "eth0"})
            toy = await cluster.spawn(f"toy {slot.trainer_rank}", TOY, node=slot.node, num_gpus=0.45, kwargs={"number": 1}, environment=environment)
            await toy.start(timeout_s=60)
            seen.append([toy.node.address, await toy.run("environment", "CUDA_VISIBLE_DEVICES", timeout_s=20), await toy.run("environment", "GLOO_SOCKET_IFNAME", timeout_s=20)])
        wider = Cluster(address=sys.argv[1], nodes=nodes, temp_dir=Path("/tmp"), log_dir=Path(sys.argv[2]), environment={})
        try:
            await wider.place(plan, timeout_s=2)
            refused = ""
        except FitError as error:
            refused = str(error)
        print(json.dumps({"taken": taken, "devices": devices, "seen": seen, "refused": refused}))
        cluster.stop()

    with joined(sys.argv[1]):
        nodes = living_nodes()
    asyncio.run(main(nodes))
    """
)


def test_devices_come_from_ray_node_by_node_and_actors_see_those_of_their_slots(
    cluster: SmallCluster,
) -> None:
    from tests.cluster_in_small import ROOT

    done = cluster.run(
        [sys.executable, "-c", PLACE, cluster.address, cluster.shared / "toys", ROOT], timeout_s=200
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    first, second = ([int(name) for name in names] for names in found["devices"])
    assert not set(first) & set(found["taken"]), "a device of somebody else"
    assert len(set(first)) == len(set(second)) == 2
    addresses = [node.address for node in cluster.nodes]
    assert found["seen"] == [
        [address, name, "eth0"]
        for address, names in zip(addresses, found["devices"], strict=True)
        for name in names
    ]
    assert (
        "did not give 4 device slots within 2 s" in found["refused"]
        and addresses[1] in found["refused"]
    )
