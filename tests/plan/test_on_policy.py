"""`train.on_policy: exact` is planned with its reason, and refused where it is not exact, or was
not shown to be."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from milescli.core.errors import ExitCode, RecipeError
from milescli.models import parse_facts
from milescli.models.scratch import config_of
from milescli.plan.make import make_plan
from milescli.plan.types import Plan
from milescli.platform.machine import parse_machine
from milescli.recipe.schema import Recipe

CPU, H200 = parse_machine("cpu"), parse_machine("8xH200")
BASE = {
    "model": {"scratch": {"num_heads": 8, "num_kv_heads": 4, "num_layers": 4}},
    "data": {"prompts": "task:sums"},
    "train": {"on_policy": "exact"},
}
EXPERTS = {"family": "qwen3_moe", "num_experts": 8, "tie_embeddings": False}


def planned(machine=CPU, facts: dict[str, object] | None = None, **sections: dict) -> Plan:
    merged = {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {*BASE, *sections}}
    recipe = Recipe.model_validate(merged)
    assert recipe.model.scratch is not None
    return make_plan(
        recipe, machine, replace(parse_facts(config_of(recipe.model.scratch)), **facts or {})
    )


def reason(plan: Plan) -> str | None:
    return next((each.reason for each in plan.decisions if each.key == "train.on_policy"), None)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"scratch": EXPERTS}, "parallel": {"ep": 2}},
        {"parallel": {"pp": 2, "dp": 2}, "train": {"updates_per_step": 2}},
        {"rollout": {"temperature": 0.7}},
        {"train": {"precision": "bf16"}},
        {"train": {"precision": "int4_qat"}},
        {"train": {"precision": "nvfp4"}, "model": {"scratch": EXPERTS}},
        {"train": {"precision": "fp8_block"}, "rollout": {"precision": "same"}},
        {"train": {"precision": "int4_qat"}, "rollout": {"precision": "bf16"}},
    ],
    ids=str,
)
def test_it_is_planned_with_its_reason(sections: dict) -> None:
    plan = planned(**{**sections, "train": {**BASE["train"], **sections.get("train", {})}})
    assert plan.on_policy == "exact" and "difference of 0.0" in (reason(plan) or "")
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("precision", "on_policy", "rounds"),
    [
        ("fp8_block", "exact", True),
        ("mxfp8", "exact", True),
        ("nvfp4", "exact", False),
        ("int4_qat", "exact", False),
        ("fp8_block", "auto", False),
    ],
)
def test_inputs_are_rounded_on_a_cpu_where_both_sides_round_to_the_same_numbers(
    precision: str, on_policy: str, rounds: bool
) -> None:
    plan = planned(train={"on_policy": on_policy, "precision": precision})
    assert plan.quantises_inputs is rounds
    why = next(each.reason for each in plan.decisions if each.key == "quantises_inputs")
    assert ("exact" in why) is (precision in ("fp8_block", "mxfp8"))


def test_what_exact_bfloat16_keeps_in_float32_is_planned() -> None:
    """Engines' caches and the trainer's activations are as large as those of float32."""

    def memory(**train: str) -> float:
        reasons = {each.key: each.reason for each in planned(train=train).decisions}
        shares = re.findall(r"(activations|cache) ([0-9.]+)", reasons["memory"])
        return sum(float(share) for _, share in shares)

    exact = {"on_policy": "exact", "precision": "bf16"}
    assert memory(**exact) > 1.5 * memory(precision="bf16", on_policy="auto")
    assert memory(**exact) == pytest.approx(memory(precision="fp32", on_policy="exact"), rel=0.1)


def test_by_default_nothing_is_said_of_it() -> None:
    plan = planned(train={"on_policy": "auto"})
    assert plan.on_policy == "auto" and reason(plan) is None
    assert plan.fingerprint != planned().fingerprint


def test_on_an_accelerator_it_is_said_to_be_unverified() -> None:
    plan = planned(H200, parallel={"tp": 2}, engines={"tp": 2})
    assert plan.on_policy == "exact" and "unverified" in (reason(plan) or "")


REFUSED = {
    "rows": {"data": {"prompts": None, "train": "task:sums"}, "train": {"objective": "supervised"}},
    "max_staleness=2": {"rollout": {"max_staleness": 2}},
    "speculative.kind=ngram": {"rollout": {"speculative": {"kind": "ngram"}}},
    "an adapter": {"train": {"lora": {"rank": 4}}},
    "weights.format=": {"weights": {"format": "some.module:form"}},
    "tp 2 of the trainer beside tp 1": {"parallel": {"tp": 2}},
    "tp 1 of the trainer beside tp 2": {"engines": {"tp": 2}},
    "rollout.precision=int4": {"rollout": {"precision": "int4"}},
    "rollout.precision=mxfp8": {
        "rollout": {"precision": "mxfp8"},
        "train": {"precision": "fp8_block"},
    },
    "rounded inputs beside engines with plain": {
        "rollout": {"precision": "bf16"},
        "train": {"precision": "fp8_block", "quantise_inputs": True},
    },
    "rounded NVFP4 inputs": {"train": {"precision": "nvfp4", "quantise_inputs": True}},
    "parallel.tp=2": {"parallel": {"tp": 2}, "engines": {"tp": 2}},
    "parallel.cp=2": {"parallel": {"cp": 2}},
    "heads of 12": {"model": {"scratch": {"head_dim": 12}}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_exact_is_refused_before_a_device_is_taken(what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        planned(**{k: {**BASE.get(k, {}), **v} for k, v in REFUSED[what].items()})
    text = f"{caught.value.what} {caught.value.why}"
    assert what in text and "train.on_policy=exact" in text
    assert "--set train.on_policy=auto" in caught.value.fixes
    assert caught.value.exit_code is ExitCode.INVALID


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"family": "mimo"}, "only llama, mistral, qwen2, qwen3, qwen3_moe were shown"),
        ({"attention_output_bias": True}, "biases"),
        ({"activation": "gelu_tanh"}, "activation `gelu_tanh`"),
    ],
)
def test_models_that_were_not_shown_to_be_exact_are_refused(facts: dict, why: str) -> None:
    with pytest.raises(RecipeError, match="not possible with this") as caught:
        planned(facts=facts)
    assert why in caught.value.why
