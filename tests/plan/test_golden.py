"""Plans of real models on real machines, written down: a change of the planner shows itself here. MILES_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import json
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
from milescli.recipe.schema import Recipe
from tests.plan.test_published import CONFIGS

GOLDEN = Path(__file__).parent / "golden"
MODELS = {
    "llama-3.1-8b": "meta-llama--Llama-3.1-8B",
    "qwen3-30b-a3b": "Qwen--Qwen3-30B-A3B",
    "qwen3.6-35b-a3b": "Qwen--Qwen3.6-35B-A3B",
    "glm-4.5": "zai-org--GLM-4.5",
    "deepseek-v3": "deepseek-ai--DeepSeek-V3",
}
MACHINES = ["8xH100", "8xH200", "8xMI300X", "16x4xGB300"]


def make_recipe(machine: str, **sections: dict[str, object]) -> Recipe:
    """64 prompts with 8 answers of up to 8192 tokens."""
    base: dict[str, object] = {
        "name": "golden",
        "model": {"path": "x"},
        "data": {"prompts": "x.jsonl", "max_prompt_tokens": 1024},
        "rollout": {"prompts_per_step": 64, "max_response_tokens": 8192},
        "machine": {"nodes": len(parse_machine(machine).nodes)},
    }
    return Recipe.model_validate(base | sections)


def compact(plan: Plan) -> str:
    """What matters, in a few lines."""
    forecast, engines = plan.forecast, plan.engines
    assert forecast is not None
    parts = [
        f"{phase}: " + " + ".join(f"{part.name} {part.size_bytes / GIB:.1f}" for part in listed)
        for phase, listed in (("training", forecast.training), ("rollout", forecast.rollout))
    ]
    seconds = f"rollout {forecast.rollout_s:.0f}, train {forecast.train_s:.0f}, sync {forecast.sync_s:.0f}, step {forecast.step_s:.0f}"
    return "\n".join(
        [
            f"trainer: {summary(plan.trainer)}; {plan.batch.max_tokens_per_microbatch} tokens a microbatch",
            f"engines: {engines.num} x tp {engines.tp}, ep {engines.ep}, attention dp {engines.attention_dp}, "
            f"{engines.memory_fraction:.2f} of memory, {engines.max_running_requests} requests",
            *parts,
            f"seconds: {seconds}",
            *(f"next: {other.layout}" for other in forecast.alternatives),
        ]
    )


@pytest.mark.skipif(not CONFIGS.is_dir(), reason=f"published configs are not at {CONFIGS} (MILES_PUBLISHED_CONFIGS)")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_the_plan_is_as_it_was(model: str, machine: str) -> None:
    facts = models.parse_facts(json.loads((CONFIGS / f"{MODELS[model]}.json").read_text()))
    try:
        told = compact(make_plan(make_recipe(machine), parse_machine(machine), facts))
    except FitError as error:
        told = f"refused: {error.what}\nwhy: {error.why}\n" + "\n".join(f"fix: {fix}" for fix in error.fixes)
    path = GOLDEN / f"{model}@{machine}.txt"
    if os.environ.get("MILES_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(told + "\n", encoding="utf-8")
    assert told + "\n" == path.read_text(encoding="utf-8")
