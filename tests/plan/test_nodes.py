"""A CPU plan over several nodes: every node works, and weights find a way to every engine."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from milescli.core.errors import FitError
from milescli.plan.make import make_plan
from milescli.plan.types import Plan
from milescli.platform.machine import parse_machine
from milescli.recipe.schema import Recipe
from milescli.runtime.evaluation.evaluate import engines_only
from milescli.runtime.inputs.model_facts import facts_of_recipe


def _plan(nodes: int, **sections: dict[str, object]) -> Plan:
    base = {
        "model": {"scratch": {"num_heads": 8, "num_kv_heads": 4, "num_layers": 4}},
        "data": {"prompts": "task:sums"},
    }
    recipe = Recipe.model_validate({**base, "machine": {"nodes": nodes}, **sections})
    return make_plan(recipe, parse_machine("cpu"), facts_of_recipe(recipe.model))


@settings(deadline=None, max_examples=40)
@given(
    nodes=st.integers(1, 6),
    tp=st.sampled_from([None, 1, 2, 4]),
    dp=st.sampled_from([None, 1, 2, 3]),
    num=st.sampled_from([None, 1, 2, 3]),
    placement=st.sampled_from(["colocated", "split"]),
)
def test_slots_fill_the_nodes_in_order(
    nodes: int, tp: int | None, dp: int | None, num: int | None, placement: str
) -> None:
    try:
        plan = _plan(
            nodes, parallel={"tp": tp, "dp": dp}, engines={"num": num, "placement": placement}
        )
    except FitError as error:
        assume("slot" not in error.what)
        raise
    places = [(slot.node, slot.device) for slot in plan.slots]
    assert places == sorted(set(places)) and places[0] == (0, 0)
    assert {node for node, _ in places} == set(range(places[-1][0] + 1)), (
        "a node is left out in the middle"
    )
    assert places[-1][0] < nodes
    if plan.channel == "tensor":
        with_trainer = {slot.node for slot in plan.slots if slot.trainer_rank is not None}
        assert {slot.node for slot in plan.slots if slot.engine is not None} <= with_trainer


def test_each_node_gets_a_trainer_rank_and_an_engine_unless_pinned() -> None:
    plan = _plan(2)
    assert [(slot.node, slot.device, slot.trainer_rank, slot.engine) for slot in plan.slots] == [
        (0, 0, 0, 0),
        (1, 0, 1, 1),
    ]
    assert (plan.trainer.dp, plan.channel, plan.cpu_threads) == (2, "tensor", _plan(1).cpu_threads)


def test_an_engine_without_a_trainer_beside_it_is_fed_through_a_group() -> None:
    pins = {"parallel": {"dp": 1}, "engines": {"num": 2}}
    assert _plan(2, **pins).channel == "distributed"
    with pytest.raises(FitError, match="shared memory"):
        _plan(2, **pins, weights={"channel": "tensor"})


def test_more_nodes_than_slots_are_refused() -> None:
    with pytest.raises(FitError, match="3 nodes are requested, but the plan has only 2 slots"):
        _plan(3, parallel={"dp": 2}, engines={"num": 1})


def test_models_that_play_roles_have_engines_of_their_own() -> None:
    roles = {"a": {"policy": "runs/x"}, "b": {"policy": "runs/x"}, "c": {"policy": "runs/y"}}
    rollout = {"agent": "multi_agent", "roles": {**roles, "d": {}}}
    plan = _plan(1, rollout=rollout, eval={"engines": "own"}, engines={"num": 5})
    assert (plan.engines_apart, plan.engines.num) == (3, 5)
    alone = engines_only(plan, num_policies=2)
    assert (alone.engines_apart, len(alone.slots)) == (2, 5)
    told = {one.key: one.reason for one in _plan(1, rollout=rollout).decisions}
    assert "2 for roles that other models play" in told["engines.num"]


def test_engines_alone_are_counted_from_the_first_node_again() -> None:
    alone = engines_only(_plan(2, engines={"num": 2, "placement": "split"}))
    assert [(slot.node, slot.device, slot.trainer_rank, slot.engine) for slot in alone.slots] == [
        (0, 0, None, 0),
        (0, 1, None, 1),
    ]
