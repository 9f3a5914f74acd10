"""A Ray cluster for one run: started on loopback or joined, with placement in topology order, bounded named waits, and a clean end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milescli.core.errors import FitError, MachineError, MilesError, WaitTimeout, WorkerDied
from milescli.plan.types import Plan

OBJECT_STORE_BYTES = 512 * 1024**2
"""Of a cluster that we start on a CPU: batches are small, and /dev/shm may be too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorHandle:
    """One of our processes, wherever it runs."""

    name: str
    """As people read it: `trainer rank 3`, `engine 0`."""
    actor: Any
    log_path: Path

    async def run(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Call a method of the hosted object. Raises what it raised, WorkerDied where its process ended, or WaitTimeout."""
        return await _bounded(self, self.actor.run.remote(method, args, kwargs), method, timeout_s)

    async def start(self, *, timeout_s: float) -> int:
        """Build the hosted object; returns its pid."""
        return await _bounded(self, self.actor.start.remote(), "start", timeout_s)

    async def peek(self, method: str, *, timeout_s: float) -> Any:
        """Call a quick method beside the one that runs."""
        return await _bounded(self, self.actor.peek.remote(method), method, timeout_s)

    async def check(self, *, timeout_s: float) -> None:
        """Raises WorkerDied where the process has ended."""
        await _bounded(self, self.actor.status.remote(), "status", timeout_s)

    async def phase(self, *, timeout_s: float = 5.0) -> str:
        """What it does now, for messages; never raises."""
        try:
            name, seconds = await asyncio.wait_for(_as_future(self.actor.status.remote()), timeout_s)
        except Exception as error:  # any failure to answer is itself the answer
            return f"does not answer ({type(error).__name__})"
        return f"in `{name}` for {seconds:.0f} s"


async def _as_future(ref: Any) -> Any:
    return await ref


async def _bounded(handle: ActorHandle, ref: Any, method: str, timeout_s: float) -> Any:
    import ray

    try:
        return await asyncio.wait_for(_as_future(ref), timeout_s)
    except TimeoutError:
        raise WaitTimeout(
            f"waited {timeout_s:.0f} s for {handle.name} to finish `{method}`",
            why=f"{handle.name} is {await handle.phase()}; its log was last written {_age(handle.log_path)}",
            fix=f"tail -50 {handle.log_path}",
        ) from None
    except ray.exceptions.RayActorError as error:
        raise WorkerDied(
            f"{handle.name} died during `{method}`",
            why=f"{_death_cause(error)}; last lines of its log:\n{tail(handle.log_path)}",
            fix=f"less {handle.log_path}",
        ) from None
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else None
        if isinstance(cause, MilesError):
            raise cause from None
        raise


def _death_cause(error: Exception) -> str:
    text = str(error)
    for line in text.splitlines():
        if "exit detail" in line.lower() or "died unexpectedly" in line or "exit type" in line.lower():
            return line.strip()
    return text.splitlines()[0] if text else type(error).__name__


def _age(path: Path) -> str:
    import time

    try:
        return f"{time.time() - path.stat().st_mtime:.0f} s ago"
    except OSError:
        return "never"


def tail(path: Path, num_lines: int = 8) -> str:
    """The last lines of a log, for an error message; empty where there is none."""
    try:
        data = path.read_bytes()[-16384:]
    except OSError:
        return "(no log)"
    return "\n".join(f"  | {line}" for line in data.decode(errors="replace").splitlines()[-num_lines:]) or "(empty log)"


class Cluster:
    """Owns the Ray session of one run. `start`, `place`, `spawn`, ..., `stop`."""

    def __init__(self, *, address: str | None, temp_dir: Path, log_dir: Path, environment: dict[str, str]) -> None:
        """`address` None: start a cluster here, with its files in `temp_dir`, a short path of the caller (socket names are
        bounded at 107 bytes). `environment`: variables that every actor gets."""
        self.address = address
        self.temp_dir = temp_dir
        self.log_dir = log_dir
        self.environment = environment
        self._group: Any = None
        self._started = False

    def start(self, plan: Plan) -> None:
        """Start or join Ray; on the calling (main) thread, since Ray's processes end with it."""
        settings: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
        if self.address:
            settings["address"] = self.address
        else:
            settings |= self._own_session(plan)
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(namespace="miles", **settings)
        except Exception as error:  # Ray raises many kinds here; all mean the same to the user
            raise MachineError(
                f"Ray did not start{f' or join {self.address}' if self.address else ''}",
                why=f"{type(error).__name__}: {error}",
                fix="miles doctor",
            ) from error
        self._started = True

    def _own_session(self, plan: Plan) -> dict[str, Any]:
        """A session on loopback only, with a token of its own."""
        token = self.temp_dir / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(token),
            RAY_USAGE_STATS_ENABLED="0",
            RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
            # A cluster of one node binds to 127.0.0.1 only when Ray takes it for "not a cluster"; it asks this variable.
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        )
        num_gpus = 0 if plan.device_kind == "cpu" else len(plan.slots)
        return {
            "num_cpus": 2 * len(plan.slots) + 1,
            "num_gpus": num_gpus,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(self.temp_dir),
        }

    async def place(self, plan: Plan, *, timeout_s: float) -> None:
        """Reserve one bundle per slot, in topology order. Raises FitError where the cluster has fewer devices."""
        import ray
        from ray.util.placement_group import placement_group

        device = {} if plan.device_kind == "cpu" else {"GPU": 1}
        bundles = [{"CPU": 2, **device} for _ in plan.slots]
        self._group = placement_group(bundles, strategy="PACK")
        try:
            await asyncio.wait_for(_as_future(self._group.ready()), timeout_s)
        except TimeoutError:
            have = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")}
            raise FitError(
                f"the Ray cluster did not give {len(bundles)} device slots within {timeout_s:.0f} s",
                why=f"needed {len(bundles)} x {bundles[0]}, the cluster has {have} and {ray.available_resources()} is free",
                fix=["use fewer devices: --gpus N", "ray status   # who holds the rest"],
            ) from None
        await self._sort_bundles(plan)

    async def _sort_bundles(self, plan: Plan) -> None:
        """Ray promises no order of bundles; sort them by (node address, bundle), so that neighbours in the plan are neighbours."""
        from ray.util.placement_group import placement_group_table

        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        self._order = sorted(range(len(plan.slots)), key=lambda index: (nodes[index], index))

    async def spawn(
        self, name: str, target: str, *, bundle: int, num_gpus: float = 0.0, kwargs: dict[str, Any], environment: dict[str, str]
    ) -> ActorHandle:
        """Start a process in a bundle. It is not waited for: call `start` of the handle."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from milescli.backends.ray.host import Host

        log_path = self.log_dir / f"{name.replace(' ', '-')}.log"
        actor = (
            ray.remote(Host)
            .options(
                num_cpus=1,
                num_gpus=num_gpus,
                max_restarts=0,
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=self._order[bundle]
                ),
                runtime_env={"env_vars": {**self.environment, **environment}},
            )
            .remote(name=name, target=target, kwargs=kwargs, log_path=str(log_path))
        )
        return ActorHandle(name=name, actor=actor, log_path=log_path)

    def put(self, value: object) -> Any:
        """Share a value with many actors, once."""
        import ray

        return ray.put(value)

    async def kill(self, handles: Sequence[ActorHandle]) -> None:
        """End processes of ours without ceremony."""
        import ray

        for handle in handles:
            ray.kill(handle.actor, no_restart=True)

    def stop(self) -> None:
        """Leave or end the Ray session. Idempotent."""
        if self._started:
            import ray

            if self._group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._group)
                self._group = None
            ray.shutdown()
            self._started = False
