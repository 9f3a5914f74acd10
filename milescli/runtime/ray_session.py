"""The Ray session of one stretch of work, with the watchdog that ends whatever belongs to it and
the environment that its processes inherit. Opened by `session`, or ahead of it by `prestart`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from milescli.backends.ray.cluster import Cluster
from milescli.backends.ray.session_processes import SessionProcesses, of_this_session
from milescli.cluster.nodes import RunNodes
from milescli.cluster.watchdog import Watchdog, start_watchdog
from milescli.core.driver_pipe import say
from milescli.core.run_processes import TOKEN_VARIABLE
from milescli.plan.types import Plan
from milescli.platform.environment import trainer_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySession:
    """What is held while it lasts."""

    cluster: Cluster
    watchdog: Watchdog
    processes: SessionProcesses
    """Those of Ray itself."""
    temp_dir: Path
    """Short, ours alone, gone afterwards; TMPDIR lies within."""


@contextmanager
def open_ray(plan: Plan, nodes: RunNodes, *, token: str) -> Iterator[RaySession]:
    """Ray is up inside; afterwards every process of the run is gone, whatever happened, and so are
    its scratch files. `token`: of the run, by which watchdogs know its processes."""
    say(token=token)
    temp_dir = Path(tempfile.mkdtemp(prefix="miles-", dir="/tmp"))
    say(scratch_dir=temp_dir)
    watchdog = start_watchdog(token=token, scratch_dirs=[temp_dir])
    old_environment, old_temp_dir = dict(os.environ), tempfile.tempdir
    # Ray opens its own folder to everybody: it lies below one that is ours alone
    for inner in ("t", "r"):
        (temp_dir / inner).mkdir()
    tempfile.tempdir = str(temp_dir / "t")
    shared = run_variables(token) | {"TMPDIR": tempfile.tempdir}
    # on a CPU of our own, ranks and engines have the same: their processes can be started ahead
    own_cpu = plan.device_kind == "cpu" and nodes.address is None
    os.environ.update(shared | (trainer_environment(plan) if own_cpu else {}))
    cluster = Cluster(
        address=nodes.address,
        nodes=[member.node for member in nodes.chosen],
        temp_dir=temp_dir / "r",
        environment=shared | _for_other_computers(nodes, os.environ),
    )
    processes = SessionProcesses()
    try:
        cluster.start(plan)
        processes.watch(of_this_session(), log_dir=cluster.temp_dir / "session_latest" / "logs")
        yield RaySession(cluster=cluster, watchdog=watchdog, processes=processes, temp_dir=temp_dir)
    finally:
        processes.expect_end()
        try:
            cluster.stop()
        finally:
            watchdog.release()
            processes.close()
            tempfile.tempdir = old_temp_dir
            os.environ.clear()
            os.environ.update(old_environment)


def run_variables(token: str) -> dict[str, str]:
    """What every process of the run inherits. SPT_NOENV: a process that changes its title leaves
    its environment readable, by which the watchdog knows it."""
    return {TOKEN_VARIABLE: token, "TOKENIZERS_PARALLELISM": "false", "SPT_NOENV": "1"}


def _for_other_computers(nodes: RunNodes, environ: Mapping[str, str]) -> dict[str, str]:
    """The user's own settings of collectives, which processes on other nodes do not inherit."""
    if not nodes.beyond_this_computer:
        return {}
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_"))
    }
