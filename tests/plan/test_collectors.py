"""Which processes collect: the driver, or several, where engines are many and the recipe allows
it."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import FitError
from milescli.plan.collectors import ENGINES_PER_COLLECTOR, choose_collectors
from milescli.plan.types import EngineLayout, Log
from milescli.recipe.load import load
from milescli.runtime.inputs.model_facts import facts_of_recipe


def _chosen(*sets: str, engines: int) -> tuple[int, str]:
    recipe = load("quickstart", sets=list(sets), environ={}, cwd=Path("/"), home=Path("/")).recipe
    log = Log()
    layout = EngineLayout(num=engines)
    count = choose_collectors(recipe, facts_of_recipe(recipe.model), layout, log)
    return count, " ".join(made.reason for made in log.decisions)


def test_the_driver_collects_from_few_engines_and_says_nothing() -> None:
    assert _chosen(engines=2) == _chosen(engines=ENGINES_PER_COLLECTOR) == (0, "")


def test_many_engines_have_one_process_for_each_few_hundred() -> None:
    count, reason = _chosen(engines=1024)
    assert count == 4 and "1024 engines" in reason


@pytest.mark.parametrize(
    ("pin", "reason"),
    [
        ("rollout.generation=mypkg:generate", "rollout.generation"),
        ("run.hooks.before_step=mypkg:hook", "run.hooks.before_step"),
        ("rollout.filter=mypkg:keep", "rollout.filter"),
        ("train.advantage=gigpo", "tokens"),
        ("rollout.agent=mypkg:play", "beside the driver"),
        ("rollout.agent=tools; rollout.tools=[mypkg:look]", "beside the driver"),
        ("rollout.agent=tools; rollout.mcp={n: {command: [n]}}", "rollout.mcp"),
    ],
)
def test_what_is_given_tokens_keeps_them_in_the_driver(pin: str, reason: str) -> None:
    count, said = _chosen(*pin.split("; "), engines=1024)
    assert count == 0 and reason in said
    with pytest.raises(FitError) as caught:
        _chosen(*pin.split("; "), "machine.collectors=2", engines=2)
    assert reason in caught.value.why


@pytest.mark.parametrize(
    "sets",
    [
        ("rollout.agent=tools", "rollout.tools=[calculator]"),
        ("train.distill.teachers=[{url: http://127.0.0.1:9}]",),
        ("train.distill.teachers=[{path: big}]", "train.distill.kl=sampled"),
    ],
)
def test_built_in_tools_and_teachers_are_asked_by_the_processes(sets: tuple[str, ...]) -> None:
    assert _chosen(*sets, "machine.collectors=2", engines=2)[0] == 2


def test_a_pinned_number_is_taken() -> None:
    assert _chosen("machine.collectors=2", engines=1)[0] == 2
    assert _chosen("machine.collectors=0", engines=1024)[0] == 0
