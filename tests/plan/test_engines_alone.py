"""Engines that are planned without a trainer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from milescli.core.errors import FitError, MemoryTaken
from milescli.core.units import GIB
from milescli.models import parse_facts, scratch
from milescli.plan.engines_alone import REMOTE_SERVER_FIX, plan_engines, with_smaller_caches
from milescli.plan.make import make_plan
from milescli.platform.machine import Machine, read_machine
from milescli.recipe.model import ScratchModel
from milescli.recipe.schema import Recipe
from milescli.recipe.templates import shipped_shape


def _recipe(**sections: dict[str, object]) -> Recipe:
    data = {"prompts": "x.jsonl", "max_prompt_tokens": 1024}
    return Recipe.model_validate({"data": data, "eval": {"max_response_tokens": 2048}} | sections)


def _facts(name: str):
    shape = shipped_shape(name)
    assert shape is not None, name
    return parse_facts(shape)


def test_engines_take_all_devices_and_nothing_is_trained() -> None:
    recipe, facts = _recipe(machine={"nodes": 2}), _facts("Qwen/Qwen3-8B")
    plan = plan_engines(recipe, read_machine("2x8xH100"), facts)
    assert plan.engines.num * plan.engines.tp == 16 == len(plan.slots)
    assert all(slot.trainer_rank is None and slot.engine is not None for slot in plan.slots)
    assert plan.engines.context_length >= 1024 + 2048


def test_a_model_that_is_too_large_to_be_trained_there_can_be_asked() -> None:
    recipe, machine, facts = _recipe(), read_machine("1xH100"), _facts("Qwen/Qwen3-14B")
    with pytest.raises(FitError):
        make_plan(recipe, machine, facts)
    assert plan_engines(recipe, machine, facts).engines.num == 1


def test_a_model_that_no_engine_holds_is_refused_with_its_size() -> None:
    with pytest.raises(FitError, match="no engine with 1 x") as refused:
        plan_engines(_recipe(), read_machine("1xH100"), _facts("Qwen/Qwen3-235B-A22B"))
    assert "an engine of tp 1 needs weights 43" in refused.value.why


def test_on_a_cpu_there_are_as_many_engines_as_a_run_would_have() -> None:
    facts = parse_facts(scratch.config_of(ScratchModel()))
    recipe, machine = _recipe(machine={"gpus": 0}), read_machine("1xH100")
    alone, run = plan_engines(recipe, machine, facts), make_plan(recipe, machine, facts)
    assert (alone.device_kind, alone.engines.num) == ("cpu", run.engines.num)
    assert len(alone.slots) == alone.engines.num


def test_on_a_cpu_they_are_no_larger_than_the_few_answers_that_are_asked_for() -> None:
    facts = parse_facts(scratch.config_of(ScratchModel()))
    evaluation = {"max_response_tokens": 2048, "num_prompts": 12}
    recipe, machine = _recipe(machine={"gpus": 0}), read_machine("1xH100")
    few = _recipe(machine={"gpus": 0}, eval=evaluation)
    assert plan_engines(few, machine, facts).engines.max_running_requests == 12
    many = plan_engines(recipe, machine, facts).engines
    assert many.num * many.max_running_requests == (
        recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    )


def test_caches_are_for_the_answers_of_an_evaluation_and_no_rollout() -> None:
    facts, machine = parse_facts(scratch.config_of(ScratchModel())), read_machine("1xH100")
    recipe = _recipe(machine={"gpus": 0}, eval={"max_response_tokens": 40})
    plan = plan_engines(recipe, machine, facts)
    each = 1024 + 40
    assert plan.engines.context_length <= each + 16
    assert plan.engines.max_total_tokens == int(128 * each * 1.25)
    few = with_smaller_caches(plan, answers=100, longest=70).engines.max_total_tokens
    assert few == int(50 * 70 * 1.25) > 4096
    most = with_smaller_caches(plan, answers=100_000, longest=each).engines
    assert most.max_total_tokens == plan.engines.max_total_tokens


def _tight(gib: float, *, free: float | None = None) -> Machine:
    node = replace(read_machine("cpu").nodes[0], memory_bytes=int(gib * GIB))
    return Machine(
        kind="cpu", nodes=[replace(node, available_bytes=int(free * GIB) if free else None)]
    )


def test_a_refusal_on_a_cpu_has_fixes_that_were_tried_and_are_of_an_evaluation() -> None:
    recipe, facts = _recipe(), _facts("Qwen/Qwen3-8B")
    machine = _tight(36)
    with pytest.raises(FitError, match="does not fit in the main memory") as refused:
        plan_engines(recipe, machine, facts)
    error = refused.value
    assert type(error) is FitError and "trainer rank" not in error.why
    assert not any("lora" in fix for fix in error.fixes)
    [fix] = [fix for fix in error.fixes if "train.precision=bf16" in fix]
    assert fix == "--set train.precision=bf16   # half the weights"
    plan_engines(_recipe(train={"precision": "bf16"}), machine, facts)


def test_what_nothing_helps_is_to_be_asked_elsewhere() -> None:
    with pytest.raises(FitError) as refused:
        plan_engines(_recipe(), _tight(24), _facts("Qwen/Qwen3-235B-A22B"))
    assert refused.value.fixes == [REMOTE_SERVER_FIX]


def test_memory_that_others_hold_is_a_refusal_of_its_own() -> None:
    with pytest.raises(MemoryTaken):
        plan_engines(_recipe(), _tight(96, free=20), _facts("Qwen/Qwen3-8B"))
    plan_engines(_recipe(), _tight(96), _facts("Qwen/Qwen3-8B"))
