"""Refusals of a recipe's plan name the cause, and propose what is accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from milescli import models
from milescli.core.errors import FitError
from milescli.models.mtp import with_mtp
from milescli.plan.make import make_plan
from milescli.plan.types import Plan
from milescli.platform.machine import parse_machine
from milescli.recipe.load import load
from milescli.recipe.templates import shipped_shape

HERE = Path(__file__).parent


def planned(recipe: str, machine: str, *sets: str) -> Plan:
    """As a launch plans it, with its checks of the recipe."""
    wanted = load(recipe, sets=list(sets), environ={}, cwd=HERE, home=HERE).recipe
    shape = shipped_shape(str(wanted.model.path))
    assert shape is not None, recipe
    facts = models.parse_facts(shape)
    if wanted.train.mtp.is_on:
        facts = with_mtp(facts)
    nodes = wanted.machine.nodes
    place = parse_machine(machine if nodes == 1 else f"{nodes}x{machine}")
    return make_plan(wanted, place, facts)


def as_sets(fix: str) -> list[str]:
    """The settings of a fix."""
    text = re.sub(r"--nodes ", "--set machine.nodes=", fix.partition("#")[0])
    text = re.sub(r"--lora ", "--set train.lora.rank=", text)
    assert re.fullmatch(r"(--set \S+ *)+", text), fix
    return re.findall(r"--set (\S+)", text)


@pytest.mark.parametrize(
    ("recipe", "machine", "setting"),
    [
        ("qwen3-8b", "1xA100", "train.optimizer.rule=muon"),
        ("mimo-7b", "2xRTX4090", "train.mtp.loss_weight=0.1"),
    ],
)
def test_a_recipe_that_does_not_fit_is_accepted_with_each_fix(
    recipe: str, machine: str, setting: str
) -> None:
    with pytest.raises(FitError) as refused:
        planned(recipe, machine, setting)
    assert refused.value.fixes
    for fix in refused.value.fixes:
        planned(recipe, machine, setting, *as_sets(fix))


@pytest.mark.parametrize(
    ("machine", "sets", "reason"),
    [
        (
            "1xRTX4090",
            ["engines.memory_fraction=0.9"],
            r"`engines.memory_fraction` 0.9 needs weights 1.1 \+ cache 19.6 .* on each device >",
        ),
        ("8xH100", ["engines.num=16"], "16 engines need at least 16 devices, and 8 are"),
        ("8xH100", ["engines.num=4", "engines.tp=4"], "4 engines x tp 4 need at least 16 devices"),
        ("8xH100", ["engines.max_total_tokens=1000"], "1,000 is less than one sequence of 2,560"),
        ("1xH100", ["engines.memory_fraction=0.01"], "leave 0 B for the cache: less than one"),
    ],
)
def test_engines_that_do_not_fit_are_refused_with_what_is_missing(
    machine: str, sets: list[str], reason: str
) -> None:
    with pytest.raises(FitError, match=r"the engines of recipe `qwen3-0.6b` do not fit") as refused:
        planned("qwen3-0.6b", machine, *sets)
    assert re.search(reason, refused.value.why), refused.value.why


@pytest.mark.parametrize(
    ("recipe", "machine", "setting", "fix"),
    [
        ("qwen3.5-9b", "2xRTX4090", "parallel.tp=3", "--set parallel.tp=2"),
        ("qwen3-32b", "1xA100", "rollout.precision=fp8_block", "--set rollout.precision=bf16"),
    ],
)
def test_a_refusal_names_its_own_fix_first_even_if_the_model_does_not_fit_then(
    recipe: str, machine: str, setting: str, fix: str
) -> None:
    with pytest.raises(FitError) as refused:
        planned(recipe, machine, setting)
    assert refused.value.fixes[0].startswith(f"first {fix}; then recipe `{recipe}` does not fit")
    with pytest.raises(FitError, match="does not fit"):
        planned(recipe, machine, setting, *as_sets(fix))
