"""The ground that a run's processes stand on: which node each slot of the plan is, and by which
address, interface, ports and devices it is used. `Outpost` is the small actor that looks after a
node where the driver is not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from milescli.backends.ray.cluster import ActorHandle, Cluster
from milescli.backends.ray.group import run_all, start_all
from milescli.backends.sglang.ports import free_ports
from milescli.plan.types import Plan, Slot
from milescli.platform import visibility
from milescli.runtime import guardian
from milescli.runtime.sites import Sites

LOOPBACK = "127.0.0.1"
OUTPOST = "milescli.runtime.ground:Outpost"
PORTS_TIMEOUT_S = 60.0
RELEASE_TIMEOUT_S = 30.0


class Outpost:
    """A watchdog, a folder for temporary files, and ports. Its actor does not carry the run's
    token, so that the watchdog, whose pipe it holds, does not end it with the others. Ray ends it
    when the driver ends, in whatever way; then the pipe closes."""

    def __init__(self, *, token: str, temp_dir: str) -> None:
        """`temp_dir`: what the run's processes have as TMPDIR; made here, and removed by the
        watchdog with the folder above it."""
        folder = Path(temp_dir)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(exist_ok=True)
        self._watchdog = guardian.start(token=token, scratch_dirs=[folder.parent])

    def free_ports(self, count: int, host: str) -> list[int]:
        """That nobody listens on, on this node."""
        return free_ports(count, host=host)

    def release(self) -> None:
        """Ask for the clean-up of this node, and wait for it."""
        self._watchdog.release()


@dataclass(slots=True, kw_only=True)
class Ground:
    """Made by the session; `take` comes before anything is spawned, `release` after all was told to
    end."""

    plan: Plan
    sites: Sites
    cluster: Cluster
    token: str
    """Of the run, by which watchdogs know its processes."""
    temp_dir: Path
    """The run's TMPDIR, by the same name everywhere."""
    api_key: str = field(init=False, repr=False)
    """What engines ask for, also on loopback: a computer may have other users."""
    outposts: dict[int, ActorHandle] = field(default_factory=dict)
    """By node of the plan: where the driver is not."""
    device_names: list[list[str]] = field(default_factory=list)
    """[plan nodes][devices] as Ray gave them; empty on a CPU."""
    _given_ports: dict[int, set[int]] = field(default_factory=dict)
    """By node of the plan: promised to servers that do not listen yet."""

    def __post_init__(self) -> None:
        self.api_key = secrets.token_urlsafe(32)

    async def take(self, *, timeout_s: float) -> None:
        """Reserve the plan's slots, learn which devices they are, and send an outpost to every node
        but the driver's."""
        await self.cluster.place(self.plan, timeout_s=timeout_s)
        self.device_names = await self._name_devices(timeout_s)
        kwargs = {"token": self.token, "temp_dir": str(self.temp_dir)}
        without_token = {guardian.TOKEN_VARIABLE: "", "TMPDIR": str(self.temp_dir.parent.parent)}
        for number in sorted({slot.node for slot in self.plan.slots}):
            if not self.cluster.nodes[number].is_driver:
                self.outposts[number] = await self.cluster.spawn(
                    f"outpost {number}",
                    OUTPOST,
                    node=number,
                    num_cpus=0.0,
                    kwargs=kwargs,
                    environment=without_token,
                )
        await start_all(list(self.outposts.values()), timeout_s=timeout_s)

    async def _name_devices(self, timeout_s: float) -> list[list[str]]:
        """A session of our own has all devices that are visible here; a cluster gives some, and
        says which."""
        kind = self.plan.device_kind
        if kind == "cpu":
            return []
        if self.sites.address is not None:
            return await self.cluster.devices(self.plan, timeout_s=timeout_s)
        places = range(1 + max(slot.device for slot in self.plan.slots))
        return [visibility.device_names(kind, places, os.environ)]

    def host(self, node: int) -> str:
        """Where servers on a node of the plan listen: loopback, unless some process of the run is
        on another computer."""
        return self.cluster.nodes[node].address if self.sites.beyond_this_computer else LOOPBACK

    def interfaces(self, node: int) -> dict[str, str]:
        """Variables that name the network interface for collectives; none where all is on this
        computer."""
        return (
            self.sites.chosen[node].interface_variables(os.environ)
            if self.sites.beyond_this_computer
            else {}
        )

    def devices(self, slots: list[Slot]) -> tuple[str, ...]:
        """As an actor's visibility variable must name them; empty on a CPU."""
        return (
            tuple(self.device_names[slot.node][slot.device] for slot in slots)
            if self.device_names
            else ()
        )

    async def free_ports(self, count: int, *, node: int) -> list[int]:
        """Asked for where they will be bound; none twice."""
        given, found = self._given_ports.setdefault(node, set()), []
        while len(found) < count:
            fresh = await self._ask_for_ports(count - len(found), node)
            found += [port for port in fresh if port not in given]
            given.update(fresh)
        return found

    async def _ask_for_ports(self, count: int, node: int) -> list[int]:
        host, outpost = self.host(node), self.outposts.get(node)
        if outpost is None:
            return await asyncio.to_thread(free_ports, count, host=host)
        return await outpost.run("free_ports", count, host, timeout_s=PORTS_TIMEOUT_S)

    async def release(self) -> None:
        """Wait until the other nodes are clean. A node that is gone cannot be cleaned, and its
        watchdog knows by itself when Ray has ended."""
        outposts = list(self.outposts.values())
        with contextlib.suppress(Exception):
            await self.cluster.kill_all(but=outposts)
            await run_all(outposts, "release", timeout_s=RELEASE_TIMEOUT_S)
        self.outposts.clear()
