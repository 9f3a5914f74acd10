"""Which environments live on all nodes of a run, and what is refused before one begins. The nodes
themselves: tests/end_to_end/cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from milescli.agents.environment import try_on_node
from milescli.backends.ray.each_node import NodeResult
from milescli.backends.ray.nodes import ClusterNode
from milescli.core.errors import MilesError, RecipeError, WaitTimeout
from milescli.core.types import Prompt
from milescli.recipe.agents import EnvironmentSettings
from milescli.recipe.schema import Rollout
from milescli.runtime.inputs import environment_nodes
from milescli.runtime.inputs.environment_nodes import require_environments, spread_environments

COUNT = EnvironmentSettings(name="tests.agents.user_environments:Count", processes=1)
PROMPT = Prompt(index=0, token_ids=[1], text="", label="4")
DRIVER, OTHER = (
    ClusterNode(node_id=name, address=f"10.0.0.{number}", host_name=name, is_driver=number == 1)
    for number, name in ((1, "a"), (2, "b"))
)


def _recipe(environment: EnvironmentSettings = COUNT, **rollout: Any) -> Any:
    settings = {"agent": "environment", "environment": environment, **rollout}
    return SimpleNamespace(rollout=Rollout(**settings))


def _require(recipe: Any, *nodes: ClusterNode) -> None:
    chosen = [SimpleNamespace(node=node) for node in nodes]
    inputs: Any = SimpleNamespace(prompts=SimpleNamespace(first=lambda count: [PROMPT] * count))
    require_environments(recipe, inputs, SimpleNamespace(address="a:1", chosen=chosen))  # type: ignore[arg-type]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Ids of the nodes that were asked, each time; they reply as this computer does."""
    asked = list[Sequence[str]]()

    def ask(_: str, target: str, kwargs: dict[str, Any], *, timeout_s: float, only: list[str]):
        assert target.rpartition(":")[2] == try_on_node.__name__ and timeout_s < 600
        asked.append(only)
        try:
            try_on_node(**kwargs)
        except MilesError as error:
            return [NodeResult(node=OTHER, error=error)]
        return [NodeResult(node=OTHER)]

    monkeypatch.setattr(environment_nodes, "run_on_each_node", ask)
    return asked


def test_other_nodes_begin_an_episode_before_a_run_does(asked: list[Sequence[str]]) -> None:
    _require(_recipe(), DRIVER, OTHER)
    assert asked == [["b"]]
    broken = COUNT.model_copy(update={"settings": {"size": 3}})
    with pytest.raises(RecipeError, match=r"does not accept its settings on node 10\.0\.0\.2"):
        _require(_recipe(broken), DRIVER, OTHER)


def test_a_node_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    late = NodeResult(node=OTHER, error=WaitTimeout(f"{OTHER} did not answer", why="", fix="x"))
    monkeypatch.setattr(environment_nodes, "run_on_each_node", lambda *_, **__: [late])
    with pytest.raises(WaitTimeout, match=r"node 10\.0\.0\.2 \(b\) did not answer"):
        _require(_recipe(), DRIVER, OTHER)


@pytest.mark.parametrize(
    ("recipe", "others"),
    [
        (_recipe(), []),
        (_recipe(agent="single_turn"), [1]),
        (_recipe(EnvironmentSettings(name="openenv")), [1]),
        (_recipe(generation="mypkg.sampling:mine"), [1]),
    ],
)
def test_what_stays_beside_the_driver(
    asked: list[Sequence[str]], recipe: Any, others: list[int]
) -> None:
    _require(recipe, DRIVER, *[OTHER] * len(others))
    cluster: Any = None  # not asked
    spread = asyncio.run(spread_environments(recipe, cluster, others, tell=lambda _: None))
    assert spread is None and asked == []
