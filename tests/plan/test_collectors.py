"""Which processes collect: the driver, or several, where engines are many and the recipe allows
it."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import FitError
from milescli.plan.collectors import (
    COLLECTOR_BYTES,
    ENGINES_PER_COLLECTOR,
    HELPER_BYTES,
    choose_collectors,
    collecting_bytes,
    collector_nodes,
    num_helpers,
)
from milescli.plan.types import EngineLayout, Log
from milescli.platform.machine import parse_machine
from milescli.recipe.load import load
from milescli.recipe.schema import Recipe


def _chosen(*sets: str, engines: int) -> tuple[int, str]:
    recipe = _recipe(*sets)
    log = Log()
    layout = EngineLayout(num=engines)
    count = choose_collectors(recipe, layout, log)
    return count, " ".join(made.reason for made in log.decisions)


def test_the_driver_collects_from_few_engines_and_says_nothing() -> None:
    assert _chosen(engines=2) == _chosen(engines=ENGINES_PER_COLLECTOR) == (0, "")


def test_many_engines_have_one_process_for_each_few_hundred() -> None:
    count, reason = _chosen(engines=1024)
    assert count == 4 and "1024 engines" in reason


@pytest.mark.parametrize(
    ("pin", "reason"),
    [
        ("run.hooks.before_step=mypkg:hook", "run.hooks.before_step"),
        ("rollout.filter=mypkg:keep", "rollout.filter"),
        ("train.advantage=gigpo; train.normalize_std=batch", "tokens"),
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
        ("rollout.agent=tools", "rollout.tools=[mypkg:look]"),
        ("rollout.agent=tools", "rollout.mcp={n: {command: [n]}}"),
        ("rollout.agent=mypkg:play", "train.credit=to_go"),
        ("rollout.generation=mypkg:generate",),
        (
            "rollout.agent=environment",
            "rollout.environment.name=mypkg:Game",
            "train.advantage=gigpo",
        ),
        ("train.distill.teachers=[{url: http://127.0.0.1:9}]",),
        ("train.distill.teachers=[{path: big}]", "train.distill.kl=sampled"),
    ],
)
def test_processes_play_any_agent_and_ask_teachers(sets: tuple[str, ...]) -> None:
    assert _chosen(*sets, "machine.collectors=2", engines=2)[0] == 2


def test_each_of_several_adapters_has_as_many() -> None:
    recipe = _recipe().model_copy(update={"adapters": {"a": {}, "b": {}, "c": {}}})
    pinned = {"machine": recipe.machine.model_copy(update={"collectors": 4})}
    for one, number in ((recipe, 1024), (recipe.model_copy(update=pinned), 1)):
        assert choose_collectors(one, EngineLayout(num=number), Log()) == 6


def _recipe(*sets: str) -> Recipe:
    return load("quickstart", sets=list(sets), environ={}, cwd=Path("/"), home=Path("/")).recipe


def test_processes_lie_on_all_nodes_unless_only_the_drivers_has_their_programs() -> None:
    assert collector_nodes(_recipe(), 3, [0, 1]) == [0, 1, 0]
    url = _recipe("rollout.agent=tools", "rollout.mcp={n: {url: http://127.0.0.1:9/mcp}}")
    assert collector_nodes(url, 2, [0, 1]) == [0, 1]
    command = _recipe("rollout.agent=tools", "rollout.mcp={n: {command: [n]}}")
    assert collector_nodes(command, 2, [0, 1]) == [0, 0]


@pytest.mark.parametrize(
    ("sets", "count"),
    [
        ((), 0),
        (("rollout.agent=mypkg:play",), 2),
        (("rollout.generation=mypkg:generate",), 2),
        (("rollout.agent=tools", "rollout.mcp={a: {command: [n]}, b: {command: [m]}}"), 4),
        (("rollout.agent=environment", "rollout.environment.name=frozen_lake"), 8),
        (
            (
                "rollout.agent=environment",
                "rollout.environment={name: frozen_lake, processes: 1}",
            ),
            2,
        ),
    ],
)
def test_what_processes_start_beside_themselves_is_counted(
    sets: tuple[str, ...], count: int
) -> None:
    assert num_helpers(_recipe(*sets), 2, num_cores=16) == count
    assert num_helpers(_recipe(*sets), 0, num_cores=16) == 0


def test_memory_of_processes_is_that_of_their_nodes() -> None:
    machine = parse_machine("2x8xH100")
    game = _recipe(
        "rollout.agent=environment", "rollout.environment={name: frozen_lake, processes: 4}"
    )
    assert collecting_bytes(game, machine, 3, nodes=[0, 1]) == {
        0: 2 * COLLECTOR_BYTES + 4 * HELPER_BYTES,
        1: COLLECTOR_BYTES + 4 * HELPER_BYTES,
    }
    assert collecting_bytes(game, machine, 0, nodes=[0, 1]) == {}


def test_a_pinned_number_is_taken() -> None:
    assert _chosen("machine.collectors=2", engines=1)[0] == 2
    assert _chosen("machine.collectors=0", engines=1024)[0] == 0
