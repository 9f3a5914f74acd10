"""The search: only legal layouts, the same result every time, little work for thousands of devices;
pins are kept, and refusals bear true fixes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import ExitCode, FitError
from milescli.core.units import GIB
from milescli.models.facts import Layer, ModelFacts, Rope, plain_layers
from milescli.plan.legal import engine_faults, faults, training_faults
from milescli.plan.make import make_plan
from milescli.plan.memory import MemoryModel
from milescli.plan.types import Plan
from milescli.platform.machine import parse_machine
from milescli.recipe.schema import Recipe
from tests.plan.recipes import make_recipe


def _facts(
    *, layers: int = 94, experts: int = 0, heads: int = 64, kv_heads: int = 4, hidden: int = 4096
) -> ModelFacts:
    dense = 2 if experts else 0
    return ModelFacts(
        family="qwen3_moe" if experts else "qwen3",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        ffn_hidden_size=12288,
        vocab_size=151936,
        tied_embeddings=False,
        rope=Rope(theta=1e6),
        norm_eps=1e-6,
        max_position_embeddings=40960,
        qk_norm=True,
        qkv_bias=False,
        layers=plain_layers(layers, moe=(False,) * dense + (True,) * (layers - dense))
        if experts
        else (Layer(),) * layers,
        num_experts=experts,
        topk=min(8, experts // 2),
        moe_ffn_hidden_size=1536 if experts else 0,
    )


def _plan(machine: str, facts: ModelFacts, **sections: dict[str, object]) -> Plan:
    return make_plan(make_recipe(machine, **sections), parse_machine(machine), facts)


@settings(max_examples=40, deadline=None)
@given(
    layers=st.integers(1, 40),
    experts=st.sampled_from([0, 6, 8, 160]),
    kv_heads=st.sampled_from([1, 2, 6, 8]),
    machine=st.sampled_from(
        ["1xH200", "3xA100", "8xMI300X", "4xL40S", "2x8xH100", "3x8xB200", "6x4xGB300"]
    ),
    split=st.booleans(),
)
def test_whatever_is_chosen_is_legal_and_fits(layers, experts, kv_heads, machine, split) -> None:
    facts = _facts(
        layers=layers, experts=experts, kv_heads=kv_heads, heads=kv_heads * 8, hidden=1024
    )
    try:
        plan = _plan(machine, facts, engines={"placement": "split" if split else "auto"})
    except FitError as error:
        assert error.fixes
        return
    layout, engines, forecast = plan.trainer, plan.engines, plan.forecast
    assert not [*faults(layout, facts), *training_faults(layout, facts)]
    assert not [
        *engine_faults(facts, tp=engines.tp, ep=engines.ep, attention_dp=engines.attention_dp)
    ]
    assert forecast is not None
    for parts in (forecast.training, forecast.rollout):
        assert sum(part.size_bytes for part in parts) == forecast.memory_bytes
        assert all(part.size_bytes >= 0 for part in parts)
    assert Plan.from_json(plan.to_json()) == plan


def test_equal_inputs_give_equal_bytes() -> None:
    facts = _facts(experts=128)
    assert _plan("8x8xH100", facts).to_json() == _plan("8x8xH100", facts).to_json()


@pytest.mark.parametrize("experts", [0, 128])
def test_four_thousand_devices_take_no_more_than_a_few_thousand_layouts(
    experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs microseconds, so that the whole is planned within a second."""
    weighed, worst_stage = [], MemoryModel.worst_stage

    def counted(self, layout, load):
        weighed.append(layout)
        return worst_stage(self, layout, load)

    monkeypatch.setattr(MemoryModel, "worst_stage", counted)
    many = {"rollout": {"prompts_per_step": 512, "max_response_tokens": 8192}}
    plan = _plan("512x8xH100", _facts(experts=experts), **many)
    assert len(plan.slots) == 4096
    assert len(weighed) < 2500, len(weighed)


def test_pins_are_kept_and_named() -> None:
    pins = {"tp": 4, "pp": 4, "cp": 2, "ep": 16, "last_stage_layers": 22}
    recompute = {
        "recompute": "full",
        "max_tokens_per_microbatch": 16384,
        "optimizer": {"offload": True},
    }
    plan = _plan(
        "8x8xH200",
        _facts(experts=128),
        parallel=pins,
        train=recompute,
        engines={"tp": 8, "memory_fraction": 0.7},
    )
    layout = plan.trainer
    assert (layout.tp, layout.pp, layout.cp, layout.ep, layout.last_stage_layers) == (
        4,
        4,
        2,
        16,
        22,
    )
    assert (layout.recompute, layout.offload_optimizer, plan.batch.max_tokens_per_microbatch) == (
        "full",
        True,
        16384,
    )
    assert (plan.engines.tp, plan.engines.memory_fraction) == (8, 0.7)
    reasons = {decision.key: decision.reason for decision in plan.decisions}
    assert reasons["trainer.tp"] == "pinned by `parallel.tp`"
    assert reasons["engines.tp"] == "pinned by `engines.tp`"


def test_every_dimension_has_a_reason_with_seconds_and_there_are_three_more_layouts() -> None:
    plan = _plan("8x8xH100", _facts(experts=128))
    reasons = {decision.key: decision.reason for decision in plan.decisions}
    for axis in ("tp", "pp", "cp", "ep"):
        assert re.search(r"\d s|legal", reasons[f"trainer.{axis}"]), axis
    assert plan.forecast is not None
    assert len(plan.forecast.alternatives) == 3
    assert len({other.layout for other in plan.forecast.alternatives}) == 3


def test_what_does_not_fit_is_refused_with_its_equation_and_a_fix_that_holds() -> None:
    facts = _facts(experts=128)
    with pytest.raises(FitError) as caught:
        _plan("8xH100", facts)
    assert caught.value.exit_code is ExitCode.DOES_NOT_FIT
    parts = re.search(
        r"weights ([\d.]+) \+ gradients ([\d.]+) \+ optimizer ([\d.]+) \+ "
        r"activations ([\d.]+) \+ logits ([\d.]+) "
        r"\+ workspace ([\d.]+) = ([\d.]+) GiB > ([\d.]+)",
        caught.value.why,
    )
    assert parts, caught.value.why
    *terms, total, budget = (float(part) for part in parts.groups())
    assert abs(sum(terms) - total) < 0.4
    assert total > budget
    (nodes,) = re.findall(r"--nodes (\d+)", " ".join(caught.value.fixes))
    assert _plan(f"{nodes}x8xH100", facts).forecast is not None


def test_a_pin_that_does_not_fit_names_the_layout_without_it() -> None:
    with pytest.raises(FitError) as caught:
        _plan("8x8xH100", _facts(experts=128), parallel={"tp": 1, "pp": 1, "ep": 1})
    assert any("--set parallel.tp=null" in fix and "fits" in fix for fix in caught.value.fixes), (
        caught.value.fixes
    )


@pytest.mark.parametrize(
    ("pins", "reason"),
    [
        ({"tp": 8}, "exceeds the model's 4 key/value heads"),
        ({"pp": 128}, "the model has 94 layers"),
        ({"pp": 4, "last_stage_layers": 94}, "do not make up 94"),
        ({"tp": 4, "sequence_parallel": False}, "need sequence parallelism"),
        ({"ep": 3}, "128 experts / 3 is not whole"),
        ({"tp": 3}, "64 attention heads / 3 is not whole"),
        ({"tp": 4, "pp": 5}, "does not divide 64 devices"),
    ],
)
def test_an_illegal_pin_is_refused_before_the_search(pins: dict[str, int], reason: str) -> None:
    with pytest.raises(FitError) as caught:
        _plan("8x8xH100", _facts(experts=128), parallel=pins)
    assert reason in f"{caught.value.what} {caught.value.why}"


def test_activations_that_do_not_fit_are_computed_again_before_the_optimizer_moves() -> None:
    long = {"rollout": {"prompts_per_step": 64, "max_response_tokens": 30000}}
    plan = _plan("8xA100", _facts(layers=36), train={"max_tokens_per_microbatch": 32768}, **long)
    assert plan.trainer.recompute == "full"
    assert not plan.trainer.offload_optimizer


def test_a_stage_has_memory_for_updates_in_which_all_sequences_are_the_longest() -> None:
    """By their mean lengths, the 8 sequences of an update would fill 4 microbatches."""
    train = {"updates_per_step": 8, "max_tokens_per_microbatch": 9216, "recompute": "full"}

    def activations(prompts: int) -> int:
        rollout = {"prompts_per_step": prompts, "max_response_tokens": 8192}
        plan = _plan("8xH200", _facts(layers=32), parallel={"pp": 8}, train=train, rollout=rollout)
        assert plan.forecast is not None
        return {part.name: part.size_bytes for part in plan.forecast.training}["activations"]

    assert activations(8) == activations(64)


def test_muon_has_memory_for_its_largest_matrix_and_stays_on_the_device() -> None:
    tight = _facts(layers=36)
    assert _plan("2xA100", tight).trainer.offload_optimizer, "AdamW's moments go to the host"
    by_muon = {"train": {"optimizer": {"rule": "muon"}}}
    with pytest.raises(FitError):
        _plan("2xA100", tight, **by_muon)
    forecasts = [_plan("8xH200", tight, **rule).forecast for rule in ({}, by_muon)]
    plain, wide = (
        next(part.size_bytes for part in forecast.training if part.name == "workspace")
        for forecast in forecasts
        if forecast is not None
    )
    gate_and_up = 2 * 12288 * 4096
    assert wide > max(plain, 20 * gate_and_up)


def test_staleness_shares_the_devices_out_between_trainer_and_engines() -> None:
    stale = {"rollout": {"prompts_per_step": 64, "max_response_tokens": 8192, "max_staleness": 1}}
    plan = _plan("4x8xH200", _facts(layers=36), **stale)
    assert not plan.colocated
    assert plan.trainer.world_size + plan.engines.num * plan.engines.tp <= 32
    assert plan.forecast is not None
    assert (
        plan.forecast.step_s
        < plan.forecast.rollout_s + plan.forecast.train_s + plan.forecast.sync_s
    )


def test_a_split_gives_more_devices_to_what_takes_longer() -> None:
    stale = {"rollout": {"prompts_per_step": 64, "max_response_tokens": 8192, "max_staleness": 1}}
    plan = _plan("2x8xH100", _facts(layers=24, hidden=2048, heads=32, kv_heads=8), **stale)
    assert (plan.trainer.world_size, plan.engines.num * plan.engines.tp) == (4, 12)
    assert {slot.node for slot in plan.slots if slot.engine == 0} == {0}


def test_auto_placement_splits_where_a_sleeping_trainer_has_no_room_in_main_memory() -> None:
    facts, machine = _facts(layers=24, hidden=2048, heads=32), parse_machine("8xH100")
    small = replace(machine, nodes=[replace(machine.nodes[0], memory_bytes=32 * GIB)])
    sync = {"async_save": False}
    assert make_plan(make_recipe("8xH100"), machine, facts).colocated
    plan = make_plan(make_recipe("8xH100", checkpoint=sync), small, facts)
    assert not plan.colocated
    reasons = {decision.key: decision.reason for decision in plan.decisions}
    assert "sharing devices would not do: trainer and engines" in reasons["placement"]
    with pytest.raises(FitError, match="main memory") as caught:
        colocated = {"engines": {"placement": "colocated"}, "checkpoint": sync}
        make_plan(make_recipe("8xH100", **colocated), small, facts)
    assert any("engines.placement=auto" in fix for fix in caught.value.fixes)


def test_the_copy_of_which_a_checkpoint_is_written_needs_main_memory() -> None:
    facts, machine = _facts(layers=24, hidden=2048, heads=32), parse_machine("8xH100")
    small = replace(machine, nodes=[replace(machine.nodes[0], memory_bytes=32 * GIB)])
    with pytest.raises(FitError, match=r"checkpoint\.async_save") as caught:
        make_plan(make_recipe("8xH100"), small, facts)
    assert "--set checkpoint.async_save=false" in caught.value.fixes


def test_memory_is_planned_for_as_uneven_experts_as_the_recipe_says() -> None:
    """And the plan says what the worst case would need."""
    layout = {"ep": 8, "tp": 1, "pp": 1, "cp": 1}
    plans = [
        _plan(
            "4x8xH200",
            _facts(layers=24, experts=64),
            train={"expert_imbalance": wanted},
            parallel=layout,
        )
        for wanted in (1.0, 6.0)
    ]
    forecasts = [plan.forecast for plan in plans if plan.forecast is not None]
    even, uneven = (
        {part.name: part.size_bytes for part in forecast.training} for forecast in forecasts
    )
    per_token = [
        parts["activations"] / plan.batch.max_tokens_per_microbatch
        for parts, plan in zip((even, uneven), plans, strict=True)
    ]
    assert per_token[1] > per_token[0] or plans[1].trainer.recompute == "full"
    assert any(
        "train.expert_imbalance" in text and "at worst it gets 8.0 times" in text
        for text in forecasts[0].assumptions
    )


def test_a_rank_that_has_all_experts_gets_all_tokens_however_uneven_they_are() -> None:
    sizes = {
        part.size_bytes
        for wanted in (1.0, 6.0)
        for part in _plan(
            "H200",
            _facts(layers=4, experts=8),
            train={"expert_imbalance": wanted},
            parallel={"ep": 1},
        ).forecast.training
        if part.name == "activations"
    }
    assert len(sizes) == 1


def test_a_recipe_says_what_is_pinned() -> None:
    assert Recipe().train.max_tokens_per_microbatch is None
    assert Recipe().train.recompute == "auto"
