"""Opens one period of work on a run: its log folder, its Ray session and the builder of its
processes. Used by launch, resume and eval, which hold the run's lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from milescli.backends.ray.cluster import Cluster
from milescli.backends.ray.nodes import DEATH_NOTICE_S
from milescli.backends.ray.session_processes import SessionProcesses
from milescli.checkpoint.run_dir import verdict_file
from milescli.cluster.resources import NodeResources
from milescli.cluster.watchdog import Watchdog
from milescli.runtime.build import Builder, check_engines
from milescli.runtime.engine_folder import write_engine_folder
from milescli.runtime.prestart import Prestarted, open_ray
from milescli.runtime.recovery.orphans import write_note
from milescli.runtime.recovery.supervise import CAUSE_GRACE_S
from milescli.runtime.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSession:
    """Holds the log folder, Ray session and builder of one period of work."""

    log_dir: Path
    cluster: Cluster
    resources: NodeResources
    builder: Builder
    ray: SessionProcesses
    """Ray's own processes."""
    watchdog: Watchdog

    @property
    def verdict_file(self) -> Path:
        """Return the path of the verdict, which is written once, at an orderly end; if the driver
        is killed, the watchdog writes it."""
        return verdict_file(self.log_dir)

    @property
    def cause_grace_s(self) -> float:
        """Return the seconds that a lost connection waits for its cause: Ray needs a while to
        notice that a node is gone."""
        return DEATH_NOTICE_S if self.resources.nodes.spans_computers else CAUSE_GRACE_S


@contextmanager
def open_session(spec: RunSpec, *, prestarted: Prestarted, log_dir: Path) -> Iterator[RunSession]:
    """Open a session, with the Ray that was started ahead or with its own. If it is its own, every
    process of the run is gone at the end."""
    if spec.plan.engines.num:
        write_engine_folder(spec)
        check_engines(spec)
    with ExitStack() as own:
        ray = prestarted.ray
        if ray is None:
            timeout_s = spec.recipe.machine.start_timeout_s
            opening = open_ray(spec.plan, spec.nodes, token=prestarted.token, timeout_s=timeout_s)
            ray = own.enter_context(opening)
        ray.watchdog.write_verdict_to(verdict_file(log_dir))
        write_note(log_dir, token=prestarted.token, scratch_dir=ray.temp_dir)
        ray.cluster.log_dir = log_dir
        resources = NodeResources(
            plan=spec.plan,
            nodes=spec.nodes,
            cluster=ray.cluster,
            token=prestarted.token,
            api_key=prestarted.api_key,
            temp_dir=ray.temp_dir / "t",
        )
        builder = Builder(
            spec=spec,
            cluster=ray.cluster,
            resources=resources,
            log_dir=log_dir,
            warm=prestarted.warm.listen(ray.temp_dir) if prestarted.warm is not None else None,
        )
        ray.processes.silence_s = spec.recipe.machine.silence_s
        yield RunSession(
            log_dir=log_dir,
            cluster=ray.cluster,
            resources=resources,
            builder=builder,
            ray=ray.processes,
            watchdog=ray.watchdog,
        )
