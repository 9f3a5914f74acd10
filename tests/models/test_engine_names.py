"""TransformerEngine's names and Megatron-Core's own are one and the same weights."""

from __future__ import annotations

import pytest

from milescli.models import parse_facts, table
from milescli.models.engine_names import fused_names, megatron_name
from tests.families.cases import ALL


@pytest.mark.parametrize("case", ALL)
def test_every_name_of_the_engine_leads_back_to_the_table(case: str) -> None:
    weights = table(parse_facts(ALL[case].config))
    for entry in weights.entries:
        mixer = "full" if entry.layer is None else entry.facts.layers[entry.layer].mixer
        assert megatron_name(entry.megatron) == entry.megatron
        for name in fused_names(entry.megatron, mixer=mixer):
            assert name != entry.megatron and megatron_name(name) == entry.megatron


@pytest.mark.parametrize(
    ("engine", "own"),
    [
        (
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.3.input_layernorm.weight",
        ),
        (
            "mtp.layers.0.transformer_layer.mlp.linear_fc1.layer_norm_bias",
            "mtp.layers.0.transformer_layer.pre_mlp_layernorm.bias",
        ),
        ("decoder.layers.1.mixer.in_proj.layer_norm_weight", "decoder.layers.1.norm.weight"),
        ("decoder.layers.1.mixer.norm.weight", "decoder.layers.1.mixer.norm.weight"),
        (
            "decoder.layers.0.mlp.experts.linear_fc2.weight7",
            "decoder.layers.0.mlp.experts.local_experts.7.linear_fc2.weight",
        ),
    ],
)
def test_names_of_the_engine(engine: str, own: str) -> None:
    assert megatron_name(engine) == own
