"""Starts processes before a run's inputs are ready: on a CPU, a process that imports what its
engines need, then Ray with its watchdog, and the ranks, which import what the trainer needs. Called
by launch, resume and eval."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from milescli.backends.ray.cluster import Cluster
from milescli.backends.ray.session_processes import SessionProcesses, of_this_session
from milescli.backends.sglang.launch.command import own_environment
from milescli.backends.sglang.launch.key import KEY_VARIABLE
from milescli.backends.sglang.launch.servable import cpu_family
from milescli.backends.sglang.launch.warm import SharedWarmProcess, WarmProcess, shared_warm_process
from milescli.cluster.nodes import RunNodes
from milescli.cluster.watchdog import Watchdog, start_watchdog
from milescli.core.driver_pipe import report_to_parent
from milescli.core.private import without_secrets
from milescli.core.run_processes import TOKEN_VARIABLE
from milescli.models import ModelFacts
from milescli.models.base import CONFIG_NAME, quantization_config
from milescli.plan.types import Plan
from milescli.platform.environment import engine_environment, trainer_environment
from milescli.recipe.schema import Recipe
from milescli.runtime.inputs.model_facts import config_of_recipe
from milescli.runtime.planning import engine_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Prestarted:
    """Holds what the processes of a run share, fixed before the first of them starts."""

    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """Token by which watchdogs identify the processes of the run."""
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    """Key that engines require, even on loopback: a computer may have other users."""
    warm: WarmProcess | SharedWarmProcess | None = None
    """None: on an accelerator, on several computers, or if it was not started."""
    ray: RaySession | None = None
    """None: the session starts its own."""


@contextmanager
def prestart_engines(
    recipe: Recipe, plan: Plan, facts: ModelFacts, *, address: str | None
) -> Iterator[Prestarted]:
    """Run the warm process of the run's engines within the context, if the plan can use one; end it
    at once at the end, even if the run was refused. `address`: of a cluster to join; its engines
    may be anywhere."""
    prestarted = Prestarted()
    own = None if address is not None else _engine_variables(recipe, plan, facts)
    if own is None:
        yield prestarted
        return
    if shared := shared_warm_process(own):
        yield replace(prestarted, warm=shared)
        return
    warm = WarmProcess()
    warm.start(_warm_environment(own, token=prestarted.token, api_key=prestarted.api_key))
    try:
        yield replace(prestarted, warm=warm)
    finally:
        warm.stop()


@contextmanager
def lend_engines(recipe: Recipe, plan: Plan, facts: ModelFacts) -> Iterator[Mapping[str, str]]:
    """Run a warm process for all runs of this recipe within the context. Yields the environment
    variables that name it, or none if the plan cannot use one."""
    own = _engine_variables(recipe, plan, facts)
    if own is None:
        yield {}
        return
    anybody, warm = Prestarted(), WarmProcess()  # each run has a token and a key of its own
    with tempfile.TemporaryDirectory(prefix="miles-warm-", dir="/tmp") as folder:
        warm.start(_warm_environment(own, token=anybody.token, api_key=anybody.api_key))
        try:
            yield warm.lend(Path(folder), own)
        finally:
            warm.stop()


def _engine_variables(recipe: Recipe, plan: Plan, facts: ModelFacts) -> dict[str, str] | None:
    """Return the environment variables of a run's engines on a CPU, without its key and token; None
    if no engine can be forked from a warm process."""
    family = cpu_family(facts)
    if plan.device_kind != "cpu" or family is None or not plan.engines.num:
        return None
    draft = Path(recipe.rollout.speculative.model or "").expanduser()
    spec = engine_spec(
        recipe,
        plan,
        index=0,
        port=0,
        model_dir=Path(),
        log_dir=Path(),
        draft_dir=draft if (draft / CONFIG_NAME).is_file() else None,
    )
    config = config_of_recipe(recipe.model)
    quantised = plan.engine_format is not None or quantization_config(config) is not None
    return engine_environment(plan) | own_environment(spec, family, quantised=quantised)


def _warm_environment(own: Mapping[str, str], *, token: str, api_key: str) -> dict[str, str]:
    inherited = without_secrets(os.environ) | run_variables(token)
    return {**inherited, **own, KEY_VARIABLE: api_key}


@contextmanager
def prestart_ray(
    recipe: Recipe, plan: Plan, nodes: RunNodes, prestarted: Prestarted
) -> Iterator[Prestarted]:
    """Run Ray on this computer's CPU within the context, and let the trainer's ranks import their
    modules. Starts nothing on an accelerator, on a cluster, or if the plan may change with a model
    that is not downloaded yet."""
    model = recipe.model.path
    is_here = model is None or Path(model).expanduser().is_dir()
    if plan.device_kind != "cpu" or nodes.address is not None or not is_here:
        yield prestarted
        return
    # aiohttp and more come with them, for which the warm process would wait
    from milescli.runtime.build import spawn_ranks_ahead

    with open_ray(
        plan, nodes, token=prestarted.token, timeout_s=recipe.machine.start_timeout_s
    ) as ray:
        spawn_ranks_ahead(ray.cluster, plan)
        yield replace(prestarted, ray=ray)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySession:
    """Holds the Ray session of a run, with the watchdog that ends all its processes."""

    cluster: Cluster
    watchdog: Watchdog
    processes: SessionProcesses
    """Ray's own processes."""
    temp_dir: Path
    """Short path, private, removed at the end; TMPDIR lies within."""


@contextmanager
def open_ray(plan: Plan, nodes: RunNodes, *, token: str, timeout_s: float) -> Iterator[RaySession]:
    """Run Ray within the context. At the end every process of the run is ended, whatever happened,
    and its scratch files are removed. `token`: of the run, by which watchdogs identify its
    processes. `timeout_s`: time limit of the start of our own Ray."""
    report_to_parent(token=token)
    temp_dir = Path(tempfile.mkdtemp(prefix="miles-", dir="/tmp"))
    report_to_parent(scratch_dir=temp_dir)
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
        cluster.start(plan, timeout_s=timeout_s)
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
    """Return the environment variables that every process of the run inherits. SPT_NOENV: a process
    that changes its title keeps its environment readable; the watchdog reads it."""
    return {TOKEN_VARIABLE: token, "TOKENIZERS_PARALLELISM": "false", "SPT_NOENV": "1"}


def _for_other_computers(nodes: RunNodes, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's own settings of collectives, which processes on other nodes do not
    inherit."""
    if not nodes.spans_computers:
        return {}
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_"))
    }
