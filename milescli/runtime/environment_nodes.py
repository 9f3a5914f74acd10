"""The environments of a run on all of its nodes: processes for them where the driver is not. On one
computer there are none, and nothing of this is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from milescli.agents.environment import EnvironmentAgent
from milescli.agents.environment_fleet import OtherNode
from milescli.backends.ray.node_processes import NodeProcesses
from milescli.cluster.resources import NodeResources
from milescli.recipe.schema import Recipe
from milescli.rollout.agents import plays_here
from milescli.rollout.episode import load_agent

BESIDE_THE_DRIVER = ("openenv",)
"""Environments of packages that `miles env install` has put on the driver's node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadEnvironments:
    """What is held while they are spread."""

    agent: EnvironmentAgent
    nodes: Sequence[NodeProcesses]
    """But the driver's."""

    def end(self) -> None:
        """Later episodes are played beside the driver. Called when none is played; may be called
        more than once."""
        self.agent.fleet.leave_nodes()
        for node in self.nodes:
            node.close()


async def spread_environments(
    recipe: Recipe, resources: NodeResources, *, tell: Callable[[str], None]
) -> SpreadEnvironments | None:
    """Environments of the recipe live on all nodes of the run from now on. None: it has none, or
    they stay with the driver. Raises WorkerDied or WaitTimeout where a node does not take them."""
    rollout, others = recipe.rollout, sorted(resources.agents)
    if not others or not plays_here(rollout) or rollout.environment.name in BESIDE_THE_DRIVER:
        return None
    agent = load_agent(rollout)
    if not isinstance(agent, EnvironmentAgent):
        return None
    nodes = [
        NodeProcesses(resources.cluster, number=number, tell=tell, name="environments")
        for number in others
    ]
    timeout_s = recipe.machine.start_timeout_s
    cores = await asyncio.gather(*(node.start(timeout_s=timeout_s) for node in nodes))
    agent.fleet.spread(
        [
            OtherNode(name=str(node.node), num_cores=num_cores, process=node.process)
            for node, num_cores in zip(nodes, cores, strict=True)
        ]
    )
    return SpreadEnvironments(agent=agent, nodes=nodes)
