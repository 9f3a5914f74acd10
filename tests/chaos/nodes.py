"""Where trials of two nodes run: a cluster in small of its own for each, and harms of its nodes and
its cables. Called by `machine`."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.oracle import events_of, of_kind
from tests.chaos.place import Place
from tests.end_to_end.cluster.small_cluster import SmallCluster, small_cluster

SLOW = (
    ("netem", "delay", "150ms", "50ms"),
    ("tbf", "rate", "1mbit", "burst", "16kb", "latency", "2s"),
)
"""Queues that delay what goes to a node; the first that the kernel has."""


class TwoNodes(Place):
    """On the first of two nodes; the calm run of a recipe is kept for the clusters to come."""

    def __init__(self, cluster: SmallCluster, kept: Place) -> None:
        """`kept`: whose folder outlives the cluster."""
        super().__init__(cluster.shared)
        self.cluster, self._kept = cluster, kept

    def launch(self, name, *, sets, options=()):
        """See Place."""
        return super().launch(name, sets=sets, options=("--nodes", "2", *options))

    def calm(self, sets: tuple[str, ...]) -> Path:
        """See Place."""
        name = "-".join(["calm2", *(text.replace(":", ".") for text in sets)])
        kept = self._kept.run(name)
        if not of_kind(events_of(kept), "RunEnded"):
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(super().calm(sets), kept, symlinks=True)
        return kept

    def left(self) -> list[str]:
        """Folders of temporary files that outlive a run, of the nodes that are there."""
        there = (node for node in self.cluster.nodes if node.init.is_running())
        return [str(path) for node in there for path in node.private.glob("miles-*")]

    def _before(self) -> list[str]:
        return self.cluster.entered(0, cwd=self.folder)

    def _environment(self) -> dict[str, str]:
        apart = {name: v for name, v in super()._environment().items() if name[:4] != "RAY_"}
        ray = self.cluster.environment() | {"RAY_ADDRESS": self.cluster.address}
        return apart | ray | {"PYTHONPATH": apart["PYTHONPATH"]}


@contextmanager
def two_nodes(kept: Place) -> Iterator[TwoNodes]:
    """A new cluster, for one trial."""
    with (
        tempfile.TemporaryDirectory(prefix="nodes-", dir="/tmp") as base,
        small_cluster(Path(base)) as cluster,
    ):
        yield TwoNodes(cluster, kept)


def cut(cluster: SmallCluster) -> None:
    """The second node's cable is pulled out of the switch."""
    cluster.on_switch("ip", "link", "set", cluster.nodes[1].name, "nomaster")


def mend(cluster: SmallCluster) -> None:
    """And put in again."""
    cluster.on_switch("ip", "link", "set", cluster.nodes[1].name, "master", "switch")


def slow(cluster: SmallCluster) -> None:
    """What goes to the second node is delayed from here on."""
    port = cluster.nodes[1].name
    for queue in SLOW:
        try:
            cluster.on_switch("tc", "qdisc", "replace", "dev", port, "root", *queue)
            return
        except subprocess.CalledProcessError:  # the kernel has no such queue
            continue
    raise AssertionError(f"none of {SLOW} is there")


def fast(cluster: SmallCluster) -> None:
    """No longer."""
    cluster.on_switch("tc", "qdisc", "del", "dev", cluster.nodes[1].name, "root")
