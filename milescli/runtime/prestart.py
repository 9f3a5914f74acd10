"""What a run begins before its inputs are there: on a CPU, the imports of its engines in a process
of their own, then Ray, and the imports of its trainer. Called by launch, resume and eval."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from milescli.backends.sglang.command import own_environment
from milescli.backends.sglang.servable import cpu_family
from milescli.backends.sglang.warm import WarmProcess
from milescli.cluster.nodes import RunNodes
from milescli.core.private import without_secrets
from milescli.models import ModelFacts
from milescli.models.base import CONFIG_NAME
from milescli.plan.types import Plan
from milescli.platform.environment import engine_environment
from milescli.recipe.schema import Recipe
from milescli.runtime.engine_spec import engine_spec
from milescli.runtime.ray_session import RaySession, open_ray, run_variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Prestarted:
    """What the processes of a run share, fixed before the first of them starts."""

    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """By which watchdogs know the processes of the run."""
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    """What engines ask for, also on loopback: a computer may have other users."""
    warm: WarmProcess | None = None
    """None: on an accelerator, on several computers, or where nobody began it."""
    ray: RaySession | None = None
    """None: the session opens its own."""


@contextmanager
def prestart_engines(
    recipe: Recipe, plan: Plan, facts: ModelFacts, *, address: str | None
) -> Iterator[Prestarted]:
    """Within it the warm process of the run's engines exists, if the plan has any use for one; at
    its end it is gone at once, also where the run was refused. `address`: of a cluster that is
    joined; its engines may be anywhere."""
    prestarted = Prestarted()
    family = cpu_family(facts)
    if plan.device_kind != "cpu" or address is not None or family is None or not plan.engines.num:
        yield prestarted
        return
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
    environment = {
        **without_secrets(os.environ),
        **run_variables(prestarted.token),
        **engine_environment(plan),
        **own_environment(replace(spec, api_key=prestarted.api_key), family),
    }
    warm = WarmProcess()
    warm.start(environment)
    try:
        yield replace(prestarted, warm=warm)
    finally:
        warm.stop()


@contextmanager
def prestart_ray(
    recipe: Recipe, plan: Plan, nodes: RunNodes, prestarted: Prestarted
) -> Iterator[Prestarted]:
    """Within it Ray is up on this computer's CPU, and the trainer's ranks import what they need;
    nothing is begun on an accelerator, on a cluster, or where the plan may change with a model that
    is yet to be fetched."""
    model = recipe.model.path
    is_here = model is None or Path(model).expanduser().is_dir()
    if plan.device_kind != "cpu" or nodes.address is not None or not is_here:
        yield prestarted
        return
    # aiohttp and more come with them, for which the warm process would wait
    from milescli.runtime.build import spawn_ranks_ahead

    with open_ray(plan, nodes, token=prestarted.token) as ray:
        spawn_ranks_ahead(ray.cluster, plan)
        yield replace(prestarted, ray=ray)
