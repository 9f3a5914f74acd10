"""Nodes that join the cluster of a run which goes on with fewer than it wants: when more can be
used than it has, the run begins again with them, between two steps."""

from __future__ import annotations

import time

from milescli.backends.ray.nodes import living_nodes
from milescli.cluster.node_loss import for_nodes
from milescli.cluster.nodes import RunNodes, choose_nodes
from milescli.core.concurrency import in_thread
from milescli.core.errors import MilesError, NodesJoined
from milescli.core.events import EventBus, Notice
from milescli.runtime.planning import plan_without_plugins
from milescli.runtime.spec import RunSpec
from milescli.runtime.stop_flag import StopFlag

LOOK_EVERY_S = 5.0
"""Also how long a node has been there before it is asked anything."""


class JoiningNodes:
    """Belongs to one attempt, whose spec has a `wished`."""

    def __init__(self, spec: RunSpec, *, stop: StopFlag, bus: EventBus) -> None:
        """`stop`: of the loop; `bus` is told of a node that cannot be used, once."""
        self._spec, self._stop, self._bus = spec, stop, bus
        self._known = {member.node.node_id for member in spec.nodes.chosen}
        """Nodes of the run, and those that were looked at and left alone."""
        self._seen = set[str]()
        """In the last look."""
        self._looked_at = time.monotonic()
        self._is_over = False

    async def probe(self) -> None:
        """Look who has joined. Never raises for what a new node is or lacks."""
        if self._is_over or time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return
        there = {node.node_id for node in await in_thread(living_nodes)}
        settled, self._seen, self._looked_at = there & self._seen, there, time.monotonic()
        self._known &= there
        if not settled - self._known:
            return
        self._known |= settled
        try:
            nodes = await in_thread(lambda: self._usable(len(settled)))
        except MilesError as error:
            text = f"the cluster has other nodes, which the run does not take: {error.what}"
            self._bus.emit(Notice(text=f"{text}: {error.why}", level="warning"))
            return
        if len(nodes.chosen) > len(self._spec.nodes.chosen):
            self._is_over = True
            self._stop.set_joined(self._joined(nodes))

    def _usable(self, num_nodes: int) -> RunNodes:
        """Raises MilesError where a run could not begin with so many nodes."""
        wished = self._spec.wished
        assert wished is not None, "a run that has all its nodes looks for none"
        loaded = for_nodes(min(num_nodes, wished.recipe.machine.nodes), wished)
        nodes = choose_nodes(loaded.recipe.machine)
        machine = nodes.machine.when_idle()  # the run itself is what holds its memory
        plan_without_plugins(loaded, machine, facts=self._spec.inputs.facts)
        inputs = self._spec.inputs
        nodes.require_shared(self._spec.run.path, inputs.model_dir, *inputs.teacher_dirs)
        return nodes

    def _joined(self, nodes: RunNodes) -> NodesJoined:
        own = {member.node.node_id for member in self._spec.nodes.chosen}
        new = [str(member.node) for member in nodes.chosen if member.node.node_id not in own]
        return NodesJoined(
            f"{', '.join(new)} joined",
            why=f"the run has {len(own)} of the nodes that it wants, and can have "
            f"{len(nodes.chosen)}; it was saved, and begins again with them",
            fix=f"miles resume {self._spec.run.shown}",
        )
