"""What each of several processes that collect gets: together they have what the recipe says, and
each node is some process's."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from milescli.recipe.schema import Recipe
from milescli.runtime.collecting.share import Share, share_of, shared_recipe

RECIPE = Recipe.model_validate(
    {
        "rollout": {
            "agent": "multi_agent",
            "roles": {
                "solver": {},
                "critic": {"endpoint": {"url": "http://127.0.0.1:9/v1", "concurrency": 9}},
            },
            "judge": {"concurrency": 3},
            "harbor": {"num_at_once": 1},
        },
        "train": {"distill": {"server": {"concurrency": 64}}},
    }
)


def test_endpoints_are_asked_as_much_at_once_as_by_one_process() -> None:
    own = shared_recipe(RECIPE, Share(count=4, on_node=1, other_nodes=()))
    endpoint = own.rollout.roles["critic"].endpoint
    assert endpoint is not None and endpoint.concurrency == 2
    assert own.rollout.judge.concurrency == own.rollout.harbor.num_at_once == 1
    assert own.train.distill.server.concurrency == 16
    assert shared_recipe(RECIPE, Share(count=1, on_node=1, other_nodes=())) == RECIPE


def test_processes_of_one_node_share_its_environments() -> None:
    environment = {"name": "frozen_lake", "processes": 5}
    changed: Any = {"rollout": {"agent": "environment", "environment": environment}}
    recipe = Recipe.model_validate(changed)
    two, many = (
        shared_recipe(recipe, Share(count=count, on_node=count, other_nodes=())).rollout
        for count in (2, 9)
    )
    assert (two.environment.processes, many.environment.processes) == (2, 1)
    usual = Recipe.model_validate(
        {"rollout": {"agent": "environment", "environment": {"name": "x"}}}
    )
    own = shared_recipe(usual, Share(count=2, on_node=2, other_nodes=())).rollout.environment
    assert own.processes == max(1, max(1, len(os.sched_getaffinity(0)) // 2) // 2)
    alone = shared_recipe(usual, Share(count=2, on_node=1, other_nodes=()))
    assert alone.rollout.environment.processes is None, "half of the cores of each node"


@given(st.integers(1, 6), st.integers(1, 9))
def test_each_node_is_in_one_share(count: int, num_nodes: int) -> None:
    all_nodes = list(range(num_nodes))
    nodes = [number % num_nodes for number in range(count)]
    shares = [share_of(number, nodes=nodes, all_nodes=all_nodes) for number in range(count)]
    owned = sorted([*set(nodes), *(node for share in shares for node in share.other_nodes)])
    assert owned == all_nodes
    assert round(sum(1 / share.on_node for share in shares), 6) == len(set(nodes))
