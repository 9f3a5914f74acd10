"""What teachers need is planned: main memory, the device in their turn, time, and layouts that they
can have too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from milescli.core.errors import FitError
from milescli.models import parse_facts, scratch
from milescli.models.facts import Layer, ModelFacts
from milescli.plan.make import make_plan
from milescli.plan.roles import QueriedModels
from milescli.plan.types import Plan
from milescli.platform.machine import parse_machine
from milescli.recipe.model import ScratchModel
from tests.plan.recipes import make_recipe

SMALL = parse_facts(
    scratch.config_of(
        ScratchModel(
            hidden_size=2048,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            ffn_hidden_size=6144,
            vocab_size=151936,
        )
    )
)
"""About 1.7 billion parameters."""
BIG = replace(
    SMALL,
    hidden_size=5120,
    num_layers=64,
    num_heads=64,
    ffn_hidden_size=25600,
    layers=(Layer(),) * 64,
)
"""About 33."""


def _plan(*teachers: ModelFacts, machine: str = "8xH200", **sections: dict[str, object]) -> Plan:
    names = [f"t{number}" for number in range(len(teachers))]
    train = {"distill": {"teachers": [{"path": name, "sources": [name]} for name in names]}}
    data = {"mix": [{"path": name} for name in names] or [{"path": "x"}]}
    recipe = make_recipe(machine, **{"train": train, "data": data, **sections})
    return make_plan(recipe, parse_machine(machine), SMALL, QueriedModels(teachers=teachers))


def test_a_teacher_takes_main_memory_and_time_and_is_shown() -> None:
    alone, taught = _plan(), _plan(BIG)
    assert alone.forecast and taught.forecast
    assert "teacher" not in [role.name for role in alone.roles]
    assert "teacher" in [role.name for role in taught.roles]
    assert taught.forecast.host_bytes > alone.forecast.host_bytes + 33e9
    assert taught.forecast.train_s > 2 * alone.forecast.train_s
    shown = next(choice for choice in taught.decisions if choice.key == "teacher t0")
    assert "of weights" in shown.reason


def test_two_teachers_share_the_prompts_and_both_stay_in_main_memory() -> None:
    one, two = _plan(BIG), _plan(BIG, BIG)
    assert one.forecast and two.forecast
    assert two.forecast.train_s < 1.2 * one.forecast.train_s
    assert two.forecast.host_bytes > one.forecast.host_bytes + 33e9


def test_a_layout_is_one_that_the_teacher_can_have_too() -> None:
    narrow = replace(SMALL, num_layers=3, layers=(Layer(),) * 3, num_kv_heads=1)
    assert _plan(narrow).trainer.tp == 1
    with pytest.raises(FitError):
        _plan(narrow, machine="cpu", parallel={"tp": 2})


def test_a_teacher_that_fits_nowhere_is_refused() -> None:
    huge = replace(BIG, hidden_size=40960, ffn_hidden_size=204800)
    with pytest.raises(FitError):
        _plan(huge, machine="1xH200")


def test_on_a_cpu_it_stands_in_main_memory() -> None:
    def memory(plan: Plan) -> float:
        shown = next(choice for choice in plan.decisions if choice.key == "memory")
        return float(shown.value.removesuffix(" GiB"))

    sizes = {"rollout": {"prompts_per_step": 2, "samples_per_prompt": 2}}
    machine = parse_machine("cpu")
    roomy = replace(machine, nodes=(replace(machine.nodes[0], memory_bytes=400 * 2**30),))
    recipe = make_recipe("cpu", **sizes, data={"mix": [{"path": "x"}], "max_prompt_tokens": 64})
    taught = recipe.model_copy(
        update={"train": recipe.train.model_validate({"distill": {"teachers": [{"path": "t"}]}})}
    )
    alone = make_plan(recipe, roomy, SMALL)
    with_teacher = make_plan(taught, roomy, SMALL, QueriedModels(teachers=[SMALL]))
    assert memory(with_teacher) > memory(alone) + 6
