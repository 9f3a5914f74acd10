"""Where Ray puts a plan: each of its nodes on the node that was chosen, with the devices that Ray
gave away, whoever has the others."""

from __future__ import annotations

import json
import sys

from tests.end_to_end.cluster.small_cluster import ROOT, SmallCluster


def test_devices_come_from_ray_node_by_node_and_actors_see_those_of_their_slots(
    cluster: SmallCluster,
) -> None:
    place = [sys.executable, "-m", "tests.end_to_end.cluster.place", cluster.address]
    done = cluster.run([*place, cluster.shared / "toys", ROOT], timeout_s=600)
    assert done.returncode == 0, done.stderr
    placed = json.loads(done.stdout)
    first, second = ([int(name) for name in names] for names in placed["devices"])
    assert not set(first) & set(placed["taken"]), "a device of somebody else"
    assert len(set(first)) == len(set(second)) == 2
    addresses = [node.address for node in cluster.nodes]
    assert placed["seen"] == [
        [address, name, "eth0"]
        for address, names in zip(addresses, placed["devices"], strict=True)
        for name in names
    ]
    assert "did not provide 4 device slots within 2 s" in placed["refused"]
    assert addresses[1] in placed["refused"]
