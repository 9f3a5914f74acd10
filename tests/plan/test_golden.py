"""Plans of recipes that ship on real machines, written down, one line per decision: a change of the
planner shows itself here.

MILES_UPDATE_GOLDEN=1 python -m pytest tests/plan/test_golden.py      # writes them anew
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from milescli import models
from milescli.core.errors import FitError
from milescli.core.units import GIB
from milescli.plan.make import make_plan
from milescli.plan.reasons import summary
from milescli.plan.types import Plan
from milescli.platform.machine import parse_machine
from milescli.recipe.load import load
from milescli.recipe.templates import shipped_shape

GOLDEN = Path(__file__).parent / "golden"
RECIPES = (
    "qwen2.5-7b",
    "qwen2.5-vl-7b",
    "llama-3.1-8b",
    "mimo-7b",
    "qwen3-8b",
    "qwen3-vl-8b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "qwen3-next-80b-a3b",
    "qwen3.6-35b-a3b",
    "glm-4.5",
    "glm-5.1",
    "deepseek-v3",
    "kimi-k2",
    "gpt-oss-20b",
    "gemma-4-31b",
    "nemotron-3-nano",
)
"""A flagship of each family."""
SLOW = ("glm-4.5", "glm-5.1", "deepseek-v3", "kimi-k2")
"""Large ones, with seconds of layouts to weigh."""
MACHINES = ("8xH100", "8xH200", "8xMI300X", "8xMI355X", "16x4xGB300")


def compact(plan: Plan) -> list[str]:
    """What matters, in a few lines."""
    forecast, engines = plan.forecast, plan.engines
    assert forecast is not None
    parts = [
        f"{phase}: " + " + ".join(f"{part.name} {part.size_bytes / GIB:.1f}" for part in listed)
        for phase, listed in (("training", forecast.training), ("rollout", forecast.rollout))
    ]
    seconds = (
        f"rollout {forecast.rollout_s:.0f}, train {forecast.train_s:.0f}, sync "
        f"{forecast.sync_s:.0f}, step {forecast.step_s:.0f}"
    )
    return [
        f"trainer: {summary(plan.trainer)}; {plan.batch.max_tokens_per_microbatch} tokens a "
        "microbatch",
        f"engines: {engines.num} x tp {engines.tp}, ep {engines.ep}, attention dp "
        f"{engines.attention_dp}, "
        f"{engines.memory_fraction:.2f} of memory, {engines.max_running_requests} requests",
        *parts,
        f"seconds: {seconds}",
        *(f"next: {other.layout}" for other in forecast.alternatives),
    ]


def outcome(recipe: str, machine: str) -> list[str]:
    """The plan, or the refusal."""
    wanted, place = load(recipe, environ={}, cwd=GOLDEN, home=GOLDEN).recipe, parse_machine(machine)
    shape = shipped_shape(str(wanted.model.path))
    assert shape is not None, recipe
    sized = wanted.model_copy(
        update={"machine": wanted.machine.model_copy(update={"nodes": len(place.nodes)})}
    )
    try:
        return compact(make_plan(sized, place, models.parse_facts(shape)))
    except FitError as error:
        return [
            f"refused: {error.what}",
            f"why: {error.why}",
            *(f"fix: {fix}" for fix in error.fixes),
        ]


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [], id=name)
        for name in RECIPES
    ],
)
def test_the_plans_are_as_they_were(recipe: str) -> None:
    lines = [
        line for machine in MACHINES for line in (f"[{machine}]", *outcome(recipe, machine), "")
    ]
    path = GOLDEN / f"{recipe}.txt"
    if os.environ.get("MILES_UPDATE_GOLDEN"):
        path.write_text("\n".join(lines), encoding="utf-8")
    assert "\n".join(lines) == path.read_text(encoding="utf-8")
