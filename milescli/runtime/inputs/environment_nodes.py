"""Distributes a run's environments over all of its nodes: starts processes for them on the nodes
without the driver. Not used on a single computer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from milescli.agents.environment import EnvironmentAgent
from milescli.agents.environment_fleet import OtherNode
from milescli.backends.ray.cluster import Cluster
from milescli.backends.ray.each_node import run_on_each_node
from milescli.backends.ray.node_processes import NodeProcesses
from milescli.cluster.nodes import RunNodes
from milescli.core.errors import RecipeError
from milescli.plan.collectors import DRIVERS_PACKAGES
from milescli.recipe.schema import Recipe, Rollout
from milescli.rollout.episode.agents import plays_here
from milescli.rollout.episode.episode import load_agent

if TYPE_CHECKING:  # processes that collect need nothing of it
    from milescli.runtime.inputs.run_inputs import RunInputs

TRY_THERE = "milescli.agents.environment:try_on_node"
TRY_TIMEOUT_S = 180.0
"""Time for a node to import an environment and start an episode."""


def require_environments(recipe: Recipe, inputs: RunInputs, nodes: RunNodes) -> None:
    """Raise RecipeError or MachineError if another node of the run cannot start an episode of the
    recipe's environment. Called before a device is taken."""
    others = [member.node.node_id for member in nodes.chosen if not member.node.is_driver]
    if not others or inputs.prompts is None or not _lives_on_nodes(recipe.rollout):
        return
    assert nodes.address is not None, "another node is one of a cluster"
    asked = {
        "import_from": list(sys.path),
        "settings": recipe.rollout.environment,
        "prompt": inputs.prompts.first(1)[0],
    }
    for answer in run_on_each_node(
        nodes.address, TRY_THERE, asked, timeout_s=TRY_TIMEOUT_S, only=others
    ):
        if isinstance(answer.error, RecipeError):
            what = f"{answer.error.what} on {answer.node}"
            raise RecipeError(what, why=answer.error.why, fix=answer.error.fixes)
        if answer.error is not None:
            raise answer.error


def _lives_on_nodes(rollout: Rollout) -> bool:
    """Return True if the episodes are played in environments that may be on other nodes."""
    plays = rollout.plays_environment and plays_here(rollout)
    return plays and rollout.environment.name not in DRIVERS_PACKAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadEnvironments:
    """Holds the processes that host environments on other nodes."""

    agent: EnvironmentAgent
    nodes: Sequence[NodeProcesses]
    """All nodes except the driver's."""

    def end(self) -> None:
        """Play later episodes on the driver's node. Call it when no episode is in progress; it may
        be called more than once."""
        self.agent.fleet.leave_nodes()
        for node in self.nodes:
            node.close()


async def spread_environments(
    recipe: Recipe,
    cluster: Cluster,
    others: Sequence[int],
    *,
    tell: Callable[[str], None],
    name: str = "environments",
) -> SpreadEnvironments | None:
    """Host environments of the recipe on the nodes `others` too, from now on. Returns None if it
    has no environment, or only one that stays with the driver. `name`: of the processes. Raises
    WorkerDied or WaitTimeout if a node cannot host them."""
    if not others or not _lives_on_nodes(recipe.rollout):
        return None
    agent = load_agent(recipe.rollout)
    assert isinstance(agent, EnvironmentAgent), "it plays in an environment"
    nodes = [NodeProcesses(cluster, number=number, tell=tell, name=name) for number in others]
    timeout_s = recipe.machine.start_timeout_s
    cores = await asyncio.gather(*(node.start(timeout_s=timeout_s) for node in nodes))
    agent.fleet.spread(
        [
            OtherNode(name=str(node.node), num_cores=num_cores, process=node.process)
            for node, num_cores in zip(nodes, cores, strict=True)
        ]
    )
    return SpreadEnvironments(agent=agent, nodes=nodes)
