"""The plan: legal layouts, each choice with its reason, equal inputs give equal bytes, and pins
that cannot be honoured are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import ExitCode, FitError
from milescli.models import ModelFacts, parse_facts
from milescli.models.scratch import config_of
from milescli.plan.choices import can_share_prompts
from milescli.plan.make import make_plan
from milescli.plan.types import Plan
from milescli.platform.machine import parse_machine
from milescli.recipe.schema import Recipe

CPU, H200 = parse_machine("cpu"), parse_machine("8xH200")


def _recipe(**sections: dict[str, object]) -> Recipe:
    base: dict[str, object] = {
        "model": {"scratch": {"num_heads": 8, "num_kv_heads": 4, "num_layers": 4}},
        "data": {"prompts": "task:sums"},
    }
    return Recipe.model_validate({**base, **sections})


def _facts(recipe: Recipe) -> ModelFacts:
    assert recipe.model.scratch is not None
    return parse_facts(config_of(recipe.model.scratch))


def _plan(recipe: Recipe, machine=CPU) -> Plan:
    return make_plan(recipe, machine, _facts(recipe))


def test_a_plan_survives_json_and_equal_inputs_give_equal_bytes() -> None:
    recipe = _recipe()
    plan = _plan(recipe)
    assert Plan.from_json(plan.to_json()) == plan
    assert _plan(recipe).to_json() == plan.to_json()


def test_reasons_do_not_change_the_fingerprint_and_choices_do() -> None:
    assert _plan(_recipe()).fingerprint == _plan(_recipe(parallel={"tp": 1})).fingerprint
    assert _plan(_recipe()).fingerprint != _plan(_recipe(parallel={"tp": 2})).fingerprint


def test_two_engines_of_a_small_model_share_the_cores_and_the_trainer_has_all_in_its_turn() -> None:
    plan = _plan(_recipe())
    cores = CPU.nodes[0].cpu_cores
    assert (plan.engines.num, plan.trainer.world_size) == (2, 1)
    assert (plan.cpu_threads, plan.engines.cpu_threads) == (cores, cores // 2)
    assert [(slot.trainer_rank, slot.engine) for slot in plan.slots] == [(0, 0), (None, 1)]
    assert plan.channel == "tensor"


@pytest.mark.parametrize(
    "sections",
    [
        {"engines": {"num": 1}},
        {"engines": {"tp": 1}},
        {"engines": {"placement": "split"}},
        {"machine": {"cpu_threads": 2}},
        {"machine": {"nodes": 2}, "parallel": {"dp": 2}},
        {"rollout": {"prompts_per_step": 4, "samples_per_prompt": 8}},
        {"model": {"scratch": {"hidden_size": 4096, "ffn_hidden_size": 16384}}},
    ],
    ids=lambda sections: " ".join(sections),
)
def test_a_node_has_one_engine_where_two_are_not_asked_for_or_not_worth_it(sections) -> None:
    plan = _plan(_recipe(**sections))
    assert plan.engines.num == len({slot.node for slot in plan.slots})


def test_one_core_is_not_shared_out() -> None:
    (node,) = CPU.nodes
    machine = replace(CPU, nodes=[replace(node, cpu_cores=1)])
    assert _plan(_recipe(), machine).engines.num == 1


def test_a_cpu_takes_turns_in_fp32_over_gloo() -> None:
    plan = _plan(_recipe())
    assert (plan.device_kind, plan.collective, plan.precision, plan.colocated, plan.channel) == (
        "cpu",
        "gloo",
        "fp32",
        True,
        "tensor",
    )
    assert [role.name for role in plan.roles] == ["policy"]


def test_staleness_splits_the_devices_and_asks_the_engine_for_the_old_policy() -> None:
    plan = _plan(_recipe(rollout={"max_staleness": 2}))
    assert (plan.colocated, plan.channel) == (False, "distributed")
    (decision,) = [d for d in plan.decisions if d.key == "old_logprobs"]
    assert decision.value == "engine"
    assert [(slot.trainer_rank, slot.engine) for slot in plan.slots] == [(0, None), (None, 0)]


@pytest.mark.parametrize(
    ("train", "reason"),
    [({"kl_coef": 0.1}, "`train.kl_coef` is 0.1"), ({"reference": True}, "pinned by")],
)
def test_a_reference_is_a_model_of_the_run_where_somebody_needs_it(
    train: dict, reason: str
) -> None:
    plan = _plan(_recipe(train=train))
    assert [role.name for role in plan.roles] == ["policy", "reference"]
    (decision,) = [d for d in plan.decisions if d.key == "reference"]
    assert reason in decision.reason


def test_a_cpu_takes_microbatches_as_long_as_the_longest_sequence() -> None:
    assert (
        _plan(_recipe(rollout={"max_response_tokens": 9000})).batch.max_tokens_per_microbatch
        == 9000 + 256
    )


def test_eight_gpus_hold_trainer_and_engines_on_the_same_devices() -> None:
    plan = _plan(_recipe(parallel={"tp": 2}, engines={"tp": 2}), H200)
    assert (plan.trainer.world_size, plan.trainer.dp, plan.engines.num, plan.precision) == (
        8,
        4,
        4,
        "bf16",
    )
    assert [slot.trainer_rank for slot in plan.slots] == list(range(8))
    assert [slot.engine for slot in plan.slots] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [slot.engine_rank for slot in plan.slots] == [0, 1] * 4


def test_zero_gpus_means_the_cpu_of_a_gpu_machine() -> None:
    plan = _plan(_recipe(machine={"gpus": 0}), H200)
    assert (plan.device_kind, plan.collective, plan.precision) == ("cpu", "gloo", "fp32")


def test_experts_on_two_cpu_ranks_make_two_ranks() -> None:
    scratch = {"family": "qwen3_moe", "num_experts": 4, "tie_embeddings": False}
    plan = _plan(_recipe(model={"scratch": scratch}, parallel={"ep": 2}))
    assert (plan.trainer.ep, plan.trainer.dp, plan.trainer.world_size) == (2, 2, 2)


def _moe(experts: int) -> dict[str, object]:
    scratch = {"family": "qwen3_moe", "num_experts": experts, "tie_embeddings": False}
    return {"scratch": scratch}


@pytest.mark.parametrize(
    ("sections", "machine", "reason"),
    [
        ({"parallel": {"tp": 3}}, CPU, "8 attention heads / 3 is not whole"),
        ({"parallel": {"tp": 8}}, CPU, "4 key/value heads"),
        ({"parallel": {"pp": 5}}, CPU, "the model has 4 layers"),
        ({"parallel": {"ep": 2}}, CPU, "the model is dense"),
        ({"engines": {"tp": 3}}, CPU, "8 attention heads / 3"),
        ({"machine": {"gpus": 4}}, CPU, "has no GPU that miles can see"),
        ({"machine": {"gpus": 16}}, H200, "8 are visible"),
        ({"parallel": {"pp": 3}}, H200, "does not divide 8 devices"),
        ({"engines": {"placement": "split", "num": 8}}, H200, "leaves 0 devices for the trainer"),
        ({"train": {"max_tokens_per_microbatch": 100}}, CPU,
         "> train.max_tokens_per_microbatch 100"),
        ({"rollout": {"prompts_per_step": 1, "samples_per_prompt": 2}, "parallel": {"dp": 4}},
         CPU, "are too few for 4"),
        ({"model": _moe(6), "parallel": {"ep": 4}}, CPU, "6 experts / 4"),
        ({"model": _moe(4), "parallel": {"tp": 2, "etp": 1}}, CPU, "etp is tp"),
    ],
)  # fmt: skip
def test_a_pin_that_cannot_be_honoured_is_refused_with_its_equation(
    sections, machine, reason: str
) -> None:
    with pytest.raises(FitError) as caught:
        _plan(_recipe(**sections), machine)
    assert reason in f"{caught.value.what} {caught.value.why}"
    assert caught.value.exit_code is ExitCode.DOES_NOT_FIT
    assert caught.value.fixes


@settings(deadline=None)
@given(
    tp=st.sampled_from([None, 1, 2, 4]),
    pp=st.sampled_from([None, 1, 2, 4]),
    cp=st.sampled_from([None, 1, 2]),
    engine_tp=st.sampled_from([None, 1, 2, 4]),
    staleness=st.integers(0, 2),
    gpus=st.sampled_from([0, 1, 2, 4, 8]),
)
def test_every_plan_gives_each_rank_and_each_engine_shard_one_device(
    tp, pp, cp, engine_tp, staleness, gpus
) -> None:
    recipe = _recipe(
        parallel={"tp": tp, "pp": pp, "cp": cp},
        engines={"tp": engine_tp},
        rollout={"max_staleness": staleness},
        machine={"gpus": gpus},
    )
    try:
        plan = _plan(recipe, H200)
    except FitError:
        return
    ranks = [slot.trainer_rank for slot in plan.slots if slot.trainer_rank is not None]
    shards = [(slot.engine, slot.engine_rank) for slot in plan.slots if slot.engine is not None]
    assert ranks == list(range(plan.trainer.world_size))
    assert sorted(shards) == [
        (engine, rank) for engine in range(plan.engines.num) for rank in range(plan.engines.tp)
    ]
    assert gpus == 0 or len(plan.slots) <= gpus
    assert plan.colocated or all(
        slot.trainer_rank is None or slot.engine is None for slot in plan.slots
    )


@pytest.mark.parametrize(
    ("sections", "machine", "shares"),
    [
        ({}, CPU, True),
        ({"model": {"scratch": {"num_heads": 8, "num_kv_heads": 4, "num_layers": 4}}}, CPU, False),
        ({"rollout": {"samples_per_prompt": 1}, "train": {"algorithm": "reinforce"}}, CPU, False),
        ({"train": {"on_policy": "exact"}}, CPU, False),
        ({"parallel": {"tp": 2}}, CPU, False),
        ({"parallel": {"cp": 2}}, CPU, False),
        ({}, H200, False),
    ],
)
def test_prompts_are_shared_where_one_rank_of_a_cpu_trains_a_wide_model(
    sections: dict, machine, shares: bool
) -> None:
    wide = {"num_heads": 8, "num_kv_heads": 4, "num_layers": 4, "hidden_size": 256}
    plan = _plan(_recipe(**{"model": {"scratch": wide}, **sections}), machine)
    assert plan.batch.shares_prompts == shares
    noted = [each.reason for each in plan.decisions if each.key == "batch.shares_prompts"]
    assert bool(noted) == shares


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),
        ({"num_experts": 8}, False),
        ({"scores": True}, False),
        ({"trains_mtp": True}, False),
    ],
)
def test_prompts_are_shared_by_models_whose_positions_are_computed_alone(
    changes: dict, can: bool
) -> None:
    assert can_share_prompts(replace(_facts(_recipe()), **changes)) == can
