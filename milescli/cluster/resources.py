"""Manages a run's nodes: the node of each slot of the plan, and its address, interface, ports and
devices. Made by runtime.session; `NodeAgent` acts for it on nodes other than the driver's."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from milescli.backends.ray.actor import ActorHandle, run_all, start_all
from milescli.backends.ray.cluster import Cluster
from milescli.cluster.nodes import RunNodes
from milescli.cluster.watchdog import NODE_AGENT
from milescli.core.run_processes import TOKEN_VARIABLE
from milescli.plan.types import Plan, Slot
from milescli.platform import visibility
from milescli.platform.ports import free_ports

LOOPBACK = "127.0.0.1"
PORTS_TIMEOUT_S = 60.0
"""Time limit of an agent's reply with free ports."""
RELEASE_TIMEOUT_S = 30.0
"""Time limit of the clean-up of other nodes: longer than a watchdog takes."""


@dataclass(slots=True, kw_only=True)
class NodeResources:
    """Manages the nodes of a session. Call `take` before any process starts, and `release` after
    all were told to end."""

    plan: Plan
    nodes: RunNodes
    cluster: Cluster
    token: str
    """Token of the run, by which watchdogs know its processes."""
    temp_dir: Path
    """The run's TMPDIR, with the same name on all nodes."""
    api_key: str = field(repr=False)
    """Key that engines require, also on loopback: a computer may have other users."""
    agents: dict[int, ActorHandle] = field(default_factory=dict)
    """Agents by node of the plan, except the driver's."""
    device_names: list[list[str]] = field(default_factory=list)
    """[plan nodes][devices] as Ray gave them; empty on a CPU."""

    async def take(self, *, timeout_s: float) -> None:
        """Reserve the plan's slots, find their devices, and start an agent on every node except the
        driver's."""
        await self.cluster.place(self.plan, timeout_s=timeout_s)
        self.device_names = await self._name_devices(timeout_s)
        kwargs = {"token": self.token, "temp_dir": str(self.temp_dir)}
        without_token = {TOKEN_VARIABLE: "", "TMPDIR": str(self.temp_dir.parent.parent)}
        for number in sorted({slot.node for slot in self.plan.slots}):
            if not self.cluster.nodes[number].is_driver:
                self.agents[number] = await self.cluster.spawn(
                    f"node agent {number}",
                    NODE_AGENT,
                    node=number,
                    num_cpus=0.0,
                    kwargs=kwargs,
                    environment=without_token,
                )
        await start_all(list(self.agents.values()), timeout_s=timeout_s)

    async def _name_devices(self, timeout_s: float) -> list[list[str]]:
        """Find the names of the devices: our own session has all that are visible here; a cluster
        assigns some."""
        kind = self.plan.device_kind
        if kind == "cpu":
            return []
        if self.nodes.address is not None:
            return await self.cluster.devices(self.plan, timeout_s=timeout_s)
        places = range(1 + max(slot.device for slot in self.plan.slots))
        return [visibility.device_names(kind, places, os.environ)]

    def host(self, node: int) -> str:
        """Return the host on which servers of a node listen: loopback, unless a process of the run
        is on another computer."""
        return self.cluster.nodes[node].address if self.nodes.spans_computers else LOOPBACK

    def interfaces(self, node: int) -> dict[str, str]:
        """Return variables that name the network interface for collectives; returns none if the run
        is on this computer alone."""
        return (
            self.nodes.chosen[node].interface_variables(os.environ)
            if self.nodes.spans_computers
            else {}
        )

    def devices(self, slots: list[Slot]) -> tuple[str, ...]:
        """Return the devices as an actor's visibility variable must name them; empty on a CPU."""
        return (
            tuple(self.device_names[slot.node][slot.device] for slot in slots)
            if self.device_names
            else ()
        )

    async def free_ports(self, count: int, *, node: int) -> list[int]:
        """Return free ports of the node where they will be bound."""
        host, node_agent = self.host(node), self.agents.get(node)
        if node_agent is None:
            return await asyncio.to_thread(free_ports, count, host=host)
        return await node_agent.run("free_ports", count, host, timeout_s=PORTS_TIMEOUT_S)

    async def release(self) -> None:
        """Wait until the other nodes are clean. A lost node cannot be cleaned from here, and its
        watchdog notices when Ray ends."""
        agents = list(self.agents.values())
        with contextlib.suppress(Exception):
            await self.cluster.kill_all(but=agents)
            await run_all(agents, "release", timeout_s=RELEASE_TIMEOUT_S)
        self.agents.clear()
