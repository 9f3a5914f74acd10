"""One stretch of work on a run: its log folder, its watchdog and its Ray session. Entered by
launch, resume and eval, which hold the run's lock."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from milescli.backends.ray.cluster import Cluster
from milescli.backends.ray.nodes import DEATH_NOTICE_S
from milescli.checkpoint.run_dir import verdict_file
from milescli.cluster.nodes import RunNodes
from milescli.cluster.resources import NodeResources
from milescli.cluster.watchdog import start_watchdog
from milescli.platform.environment import trainer_environment
from milescli.runtime.build import Builder
from milescli.runtime.prestart import Prestarted, run_variables
from milescli.runtime.spec import RunSpec
from milescli.runtime.supervise import CAUSE_GRACE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSession:
    """What is held while it lasts."""

    log_dir: Path
    cluster: Cluster
    resources: NodeResources
    builder: Builder

    @property
    def verdict_file(self) -> Path:
        """Written once, when the work ended in order; the watchdog writes it where the driver was
        killed."""
        return verdict_file(self.log_dir)

    @property
    def cause_grace_s(self) -> float:
        """How long a lost connection waits for its cause: Ray needs a while to find that a node is
        gone."""
        return DEATH_NOTICE_S if self.resources.nodes.beyond_this_computer else CAUSE_GRACE_S


@contextmanager
def open_session(spec: RunSpec, *, prestarted: Prestarted, log_dir: Path) -> Iterator[RunSession]:
    """Ray is up inside; afterwards every process of the session is gone, whatever happened, and so
    are its scratch files."""
    plan, nodes, token = spec.plan, spec.nodes, prestarted.token
    temp_dir = Path(tempfile.mkdtemp(prefix="miles-", dir="/tmp"))
    watchdog = start_watchdog(token=token, scratch_dirs=[temp_dir], verdict=verdict_file(log_dir))
    old_environment, old_temp_dir = dict(os.environ), tempfile.tempdir
    (temp_dir / "t").mkdir()
    tempfile.tempdir = str(temp_dir / "t")
    shared = run_variables(token) | {"TMPDIR": tempfile.tempdir}
    # on a CPU of our own, ranks and engines have the same: their processes can be started ahead
    own_cpu = plan.device_kind == "cpu" and nodes.address is None
    os.environ.update(shared | (trainer_environment(plan) if own_cpu else {}))
    cluster = Cluster(
        address=nodes.address,
        nodes=[member.node for member in nodes.chosen],
        temp_dir=temp_dir,
        log_dir=log_dir,
        environment=shared | _for_other_computers(nodes),
    )
    resources = NodeResources(
        plan=plan,
        nodes=nodes,
        cluster=cluster,
        token=token,
        api_key=prestarted.api_key,
        temp_dir=temp_dir / "t",
    )
    try:
        warm = prestarted.warm.listen(temp_dir) if prestarted.warm is not None else None
        builder = Builder(
            spec=spec, cluster=cluster, resources=resources, log_dir=log_dir, warm=warm
        )
        builder.check()
        cluster.start(plan)
        yield RunSession(log_dir=log_dir, cluster=cluster, resources=resources, builder=builder)
    finally:
        try:
            cluster.stop()
        finally:
            watchdog.release()
            tempfile.tempdir = old_temp_dir
            os.environ.clear()
            os.environ.update(old_environment)


def _for_other_computers(nodes: RunNodes) -> dict[str, str]:
    """The user's own settings of collectives, which processes on other nodes do not inherit."""
    if not nodes.beyond_this_computer:
        return {}
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_"))
    }
