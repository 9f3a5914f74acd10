"""What is served where, read without SGLang; and that the reading agrees with what is installed."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from milescli.backends.sglang.launch.servable import (
    CPU_FAMILIES,
    fault_of_adapter,
    fault_of_quantised,
    fault_of_record,
    missing_fields,
    model_zoo,
    servable_on_cpu,
)
from milescli.export.config import quantization_config
from milescli.models import parse_facts
from milescli.models.facts import Layer, Rope, RopeScaling
from tests.backends.sglang.launch.test_server import CONFIG

QWEN3 = parse_facts({**CONFIG, "model_type": "qwen3", "tie_word_embeddings": False})


def test_families_of_which_no_engine_keeps_a_record_are_named():
    moe = replace(QWEN3, layers=(Layer(mlp="moe"),) * 2)
    assert fault_of_record(QWEN3) == "no layer of the model has experts"
    unrecorded = {"hy_v3", "minimax_m2"}
    for family in ("nemotron_h", "gemma4", *unrecorded):
        assert "SGLang 0.5.20" in (fault_of_record(replace(moe, family=family)) or "")
    recorded = {name for name in CPU_FAMILIES if fault_of_record(replace(moe, family=name)) is None}
    assert recorded == set(CPU_FAMILIES) - unrecorded


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (replace(QWEN3, ffn_hidden_size=64), None),
        (replace(QWEN3, family="deepseek_v3"), "compared"),
        (replace(QWEN3, ffn_hidden_size=44), "inner size of 44"),
    ],
)
def test_adapters_are_served_where_they_were_compared(facts, says):
    fault = fault_of_adapter(facts)
    assert says in fault if says else fault is None


def test_a_plain_model_is_served_and_one_with_windows_where_they_are_heeded():
    assert servable_on_cpu(QWEN3)[0]
    gemma = replace(QWEN3, family="gemma3", tied_embeddings=True)
    assert servable_on_cpu(replace(gemma, layers=(Layer(mixer="sliding"), Layer())))[0]


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (replace(QWEN3, family="nemotron_h"), "compared"),
        (replace(QWEN3, family="deepseek_v4"), "FP8"),
        (replace(QWEN3, family="glm4_moe", tied_embeddings=True), "tied"),
        (replace(QWEN3, family="gemma3", tied_embeddings=False), "weights of its own"),
        (replace(QWEN3, layers=(Layer(mixer="sliding"),) * 2), "window"),
        (replace(QWEN3, family="glm4_moe", layers=(Layer(mlp="moe"), Layer())), "behind"),
        (replace(QWEN3, family="qwen3_moe", layers=(Layer(), Layer(mlp="moe"))), "no experts"),
        (replace(QWEN3, mlp_bias=True), "biases"),
        (
            replace(
                QWEN3,
                rope=Rope(
                    theta=1e4,
                    scaling=RopeScaling(
                        kind="yarn", factor=4.0, original_max_positions=64, attention_factor=0.9
                    ),
                ),
            ),
            "attention_factor",
        ),
    ],
)
def test_what_would_be_served_wrongly_is_named(facts, says):
    servable, why = servable_on_cpu(facts)
    assert not servable
    assert says in why


def test_every_family_has_its_module_in_the_installed_sglang():
    assert {family.module for family in CPU_FAMILIES.values()} <= {
        path.stem for path in model_zoo().glob("*.py")
    }


def test_the_number_of_dense_layers_is_told_where_a_list_of_kinds_says_it():
    config = {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "dense", "sparse"]}
    assert missing_fields(config)["first_k_dense_replace"] == 2
    assert missing_fields({"model_type": "glm4_moe_lite"})["first_k_dense_replace"] == 1
    assert (
        missing_fields({"model_type": "glm4_moe_lite", "first_k_dense_replace": 3}).get(
            "first_k_dense_replace"
        )
        is None
    )


def _architectures() -> set[str]:
    """Return what `EntryClass = ...` names in each model of the installed SGLang."""
    return {
        node.id
        for path in model_zoo().glob("*.py")
        for statement in ast.parse(path.read_text("utf-8")).body
        if isinstance(statement, ast.Assign) and "EntryClass" in ast.unparse(statement.targets[0])
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Name)
    }


def test_a_folder_that_names_no_architecture_is_given_one():
    known = _architectures()
    for model_type, family in CPU_FAMILIES.items():
        assert missing_fields({"model_type": model_type})["architectures"] == [family.architecture]
        assert "architectures" not in missing_fields(
            {"model_type": model_type, "architectures": ["Own"]}
        )
        assert family.architecture in known


INT4 = quantization_config("int4", [])


def _int4(**changed: object) -> dict:
    weights = {**INT4["config_groups"]["group_0"]["weights"], **changed}
    return {**INT4, "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("quantised", "is_served"),
    [
        (None, True),
        *((quantization_config(form, []), True) for form in ("fp8", "mxfp8", "int4", "nvfp4")),
        (_int4(group_size=128), True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, True),
        ({"quant_method": "fp8"}, False),
        ({"quant_method": "mxfp4"}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, False),
        ({"quant_method": "awq", "bits": 4}, False),
        (_int4(num_bits=8), False),
        (_int4(group_size=None, strategy="channel"), False),
        (_int4(symmetric=False), False),
        (_int4(actorder="group"), False),
        ({**INT4, "format": "nvfp4-pack-quantized"}, False),
    ],
)
def test_quantised_weights_are_served_on_a_cpu_where_they_are_computed(quantised, is_served):
    fault = fault_of_quantised({"quantization_config": quantised} if quantised else {})
    assert (fault is None) == is_served, fault
