"""Manages the Ray cluster of one run: started on loopback or joined, with placement in topology
order, time limits on every wait, and an orderly end."""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from milescli.backends.ray.actor import ActorHandle, as_future
from milescli.backends.ray.joining import START_TIMEOUT_S, join, start_here
from milescli.backends.ray.nodes import (
    ClusterNode,
    find_dead,
    living_nodes,
    node_died,
)
from milescli.core.concurrency import in_thread
from milescli.core.errors import FitError, WaitTimeout
from milescli.core.private import hidden_secrets
from milescli.plan.types import Plan

ACTORS_PER_SLOT = 2
"""A trainer rank and an engine. Each gets one of Ray's CPUs, whatever it actually uses."""
LEAVE_TIMEOUT_S = 15.0
"""Time for this process to leave Ray, which waits for Ray's own processes."""
CALLS_AT_ONCE = 256
"""Number of concurrent calls of one actor: `run` on its work thread, one after the other, `status`
and `peek` beside it. Every collecting process may wait for the reward model's actor."""


class Cluster:
    """Manages the Ray session of one run: `start`, `place`, `spawn`, ..., `stop`."""

    def __init__(
        self,
        *,
        address: str | None,
        temp_dir: Path,
        environment: dict[str, str],
        nodes: Sequence[ClusterNode] = (),
    ) -> None:
        """Join the cluster at `address`; None: start one here with its files in `temp_dir`, a short
        path (socket names are limited to 107 bytes). `environment`: variables of every actor.
        `nodes`: the joined cluster's nodes in the plan's order."""
        self.address = address
        self.temp_dir = temp_dir
        self.log_dir = temp_dir
        """Where actors log that are spawned from now on; set by whoever has a better one."""
        self.environment = environment
        self.nodes = list(nodes)
        """[plan nodes] after `start`"""
        self._inherited: dict[str, str] = {}
        self._group: Any = None
        self._started = False
        self._spawned: list[ActorHandle] = []
        self._ahead: dict[str, Any] = {}
        """By name, actors that wait for whoever spawns them."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process of the run, which starts actors in the same places.
        Those actors end with it."""
        return {**vars(self), "_spawned": [], "_ahead": {}, "_started": False}

    def start(self, plan: Plan, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start or join Ray, in the main thread, since Ray's processes end with it. `timeout_s`:
        limit of a start here, after which this process ends with an error. Raises MachineError if
        this machine, or that cluster, is not ready."""
        self._started = True  # already: what is cut short has processes to be ended, too
        if self.address is None:
            settings = self._own_session(plan)
            with hidden_secrets():
                self._inherited = dict(os.environ)
                start_here(settings, timeout_s=timeout_s)
            self.nodes = living_nodes()
        else:
            join(self.address)

    def _own_session(self, plan: Plan) -> dict[str, Any]:
        """Return the settings of a session that listens on loopback only, with its own token."""
        token = self.temp_dir / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(token),
            RAY_USAGE_STATS_ENABLED="0",
            RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
            # A cluster of one node binds to 127.0.0.1 only when Ray takes it for "not a cluster";
            # it asks this variable.
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        )
        num_gpus = 0 if plan.device_kind == "cpu" else len(plan.slots)
        return {
            "num_cpus": ACTORS_PER_SLOT * len(plan.slots),
            "num_gpus": num_gpus,
            "include_dashboard": False,
            "object_store_memory": plan.object_store_bytes,
            "_temp_dir": str(self.temp_dir),
            # else Ray's workers, trainer ranks among them, give way to everything; and Linux lets
            # two threads of little weight share a core while another is free
            "_system_config": {"worker_niceness": 0},
        }

    async def place(self, plan: Plan, *, timeout_s: float) -> None:
        """Reserve the plan's resources, one bundle for each of its nodes; a second call does
        nothing. Raises FitError if a node has too few, or they are in use."""
        import ray
        from ray.util.placement_group import placement_group

        if self._group is not None:
            return
        bundles = _bundles(plan)
        assert len(bundles) <= len(self.nodes), f"a plan for {len(bundles)} nodes on {self.nodes}"
        pinned = [{"ray.io/node-id": node.node_id} for node in self.nodes[: len(bundles)]]
        self._group = placement_group(
            bundles, strategy="STRICT_SPREAD", bundle_label_selector=pinned
        )
        try:
            await asyncio.wait_for(as_future(self._group.ready()), timeout_s)
        except TimeoutError:
            have = {
                name: count
                for name, count in ray.cluster_resources().items()
                if name in ("CPU", "GPU")
            }
            needed = [
                f"{bundle} on {node.address}"
                for bundle, node in zip(bundles, self.nodes, strict=False)
            ]
            raise FitError(
                f"the Ray cluster did not provide {len(plan.slots)} device slots within "
                f"{timeout_s:.0f} s",
                why=f"needed: {', '.join(needed)}; the cluster has {have}, and {_free()} is free",
                fix=["use fewer devices: --gpus N", "ray status   # what uses the rest?"],
            ) from None

    async def devices(self, plan: Plan, *, timeout_s: float) -> list[list[str]]:
        """Return [plan nodes][devices] the value of the visibility variable for each device that
        Ray assigned: on a shared cluster these need not be the first. Called after `place`, before
        any process starts."""
        import ray

        given = ray.remote(max_retries=0)(_given_devices)
        counts = [int(bundle["GPU"]) for bundle in _bundles(plan)]
        requests = [
            given.options(
                num_cpus=0, num_gpus=count, scheduling_strategy=self._in_bundle(node)
            ).remote()
            for node, count in enumerate(counts)
        ]
        try:
            names = await asyncio.wait_for(asyncio.gather(*map(as_future, requests)), timeout_s)
        except TimeoutError:
            raise WaitTimeout(
                "Ray did not report which devices it assigned",
                why=f"a task on each of {len(requests)} nodes was pending for {timeout_s:.0f} s",
                fix="ray status   # is every node still there?",
            ) from None
        assert [len(of_node) for of_node in names] == counts, f"asked for {counts}, given {names}"
        return names

    def _in_bundle(self, node: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=node
        )

    async def spawn(
        self,
        name: str,
        target: str,
        *,
        node: int,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        kwargs: dict[str, Any],
        environment: dict[str, str],
    ) -> ActorHandle:
        """Start a process on a node of the plan without waiting for it: call `start` of the
        handle."""
        log_path = self.log_dir / f"{name.replace(' ', '-')}.log"
        if name in self._ahead:
            actor = self._ahead.pop(name)
            log_path.touch()  # it may have died already, and errors name its log
        else:
            actor = self._actor(name, target, node, num_cpus, num_gpus, environment)
        handle = ActorHandle(
            name=name, actor=actor, log_path=log_path, node=self.nodes[node], kwargs=kwargs
        )
        self._spawned.append(handle)
        return handle

    def spawn_ahead(self, name: str, target: str, *, environment: dict[str, str]) -> None:
        """Start a process, on the first node and without a device, before `spawn` asks for it, so
        that it can import its modules in the meantime."""
        self._ahead[name] = self._actor(name, target, 0, 1.0, 0.0, environment)

    def _actor(
        self,
        name: str,
        target: str,
        node: int,
        num_cpus: float,
        num_gpus: float,
        environment: dict[str, str],
    ) -> Any:
        import ray

        from milescli.backends.ray.host import Host

        options = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "max_restarts": 0,
            "max_concurrency": CALLS_AT_ONCE,
            "scheduling_strategy": self._in_bundle(node),
            **self._with_variables({**self.environment, **environment}),
        }
        return ray.remote(Host).options(**options).remote(name=name, target=target)

    def _with_variables(self, environment: dict[str, str]) -> dict[str, Any]:
        """Return the options of an actor. Our own session inherited this process's environment: an
        actor without further variables gets a process that Ray started in advance, and waits
        neither for Ray's environment agent nor for a new process."""
        own = {
            name: value for name, value in environment.items() if self._inherited.get(name) != value
        }
        return {"runtime_env": {"env_vars": environment}} if own else {}

    async def check_nodes(self) -> None:
        """Raise WorkerDied if a node of the run has died."""
        dead = await in_thread(lambda: find_dead(self.nodes))
        if dead is not None:
            raise node_died(dead, "whatever of this run was there is gone with it")

    async def put(self, value: object) -> Any:
        """Store a value for many actors and return its reference. Runs in a thread: if Ray hangs,
        signals still work."""
        import ray

        return await in_thread(lambda: ray.put(value))

    async def kill(self, handles: Sequence[ActorHandle]) -> None:
        """Kill processes of the run at once. Idempotent."""
        import ray

        for handle in handles:
            if handle in self._spawned:
                self._spawned.remove(handle)
            ray.kill(handle.actor, no_restart=True)

    async def kill_all(self, *, but: Sequence[ActorHandle]) -> None:
        """Kill every process that was spawned, except those in `but`."""
        await self.kill([handle for handle in self._spawned if handle not in but])

    def stop(self) -> None:
        """Leave or end the Ray session. Idempotent. If Ray hangs, the watchdog ends it."""
        if self._started:
            import ray

            # ends our job, and with it its placement group: to ask for that by name would wait for
            # a Ray that was ended together with us, until that ends this process
            leaving = threading.Thread(target=ray.shutdown, name="leave-ray", daemon=True)
            leaving.start()
            leaving.join(LEAVE_TIMEOUT_S)
            if leaving.is_alive():
                atexit.unregister(ray.shutdown)
            self._group = None
            self._started = False


def _bundles(plan: Plan) -> list[dict[str, float]]:
    """Return [plan nodes] the resources that the slots of each node need."""
    counts = Counter(slot.node for slot in plan.slots)
    device = 0 if plan.device_kind == "cpu" else 1
    return [
        {
            "CPU": ACTORS_PER_SLOT * counts[node],
            **({"GPU": device * counts[node]} if device else {}),
        }
        for node in sorted(counts)
    ]


def _free() -> dict[str, float]:
    import ray

    return {
        name: count for name, count in ray.available_resources().items() if name in ("CPU", "GPU")
    }


def _given_devices() -> list[str]:
    """Return the names of a task's GPUs, all those of its bundle, in a stable order."""
    import ray

    return sorted(map(str, ray.get_gpu_ids()), key=lambda name: (len(name), name))
