"""Qwen3-Next and Qwen3.5: what their configs mean, under which names disks hold them, and what is
refused."""

from __future__ import annotations

import pytest
import torch

from milescli import models
from milescli.core.errors import CheckpointError

TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 40,
    "vocab_size": 131,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 12,
}
MOE = {**TEXT, **EXPERTS, "model_type": "qwen3_5_moe_text"}
NEXT = {**TEXT, **EXPERTS, "model_type": "qwen3_next"}


def test_full_attention_comes_every_fourth_layer_unless_the_config_lists_them() -> None:
    usual = models.parse_facts(TEXT)
    assert [layer.mixer for layer in usual.layers] == ["gated_delta"] * 3 + ["full"]
    listed = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    facts = models.parse_facts({**TEXT, "layer_types": listed})
    assert [layer.mixer for layer in facts.layers] == ["full", "gated_delta", "gated_delta", "full"]


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ({}, 0.25),
        ({"partial_rotary_factor": 0.5}, 0.5),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, 0.5),
        # as transformers 5 writes it, which goes by the inner one
        ({"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.5}}, 0.5),
    ],
)
def test_a_quarter_of_each_head_is_rotated_unless_the_config_says_otherwise(
    said: dict, share: float
) -> None:
    rope = models.parse_facts({**TEXT, **said}).rope
    assert rope is not None
    assert rope.share == share


def test_a_multimodal_release_is_its_text_model_with_the_outer_flag_for_tied_embeddings() -> None:
    outer = {
        "model_type": "qwen3_5",
        "text_config": {**TEXT, "tie_word_embeddings": False},
        "tie_word_embeddings": True,
    }
    facts = models.parse_facts(outer)
    assert (facts.family, facts.multimodal, facts.tied_embeddings) == ("qwen3_5", True, True)
    table = models.table(facts)
    assert "model.language_model.layers.3.self_attn.q_proj.weight" in table.hf_shapes()
    assert table.is_passthrough("model.visual.blocks.0.attn.qkv.weight")
    assert "lm_head.weight" not in table.hf_shapes()


@pytest.mark.parametrize("beside_vision", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_either_prefix_and_either_form_of_experts_is_found_on_disk(
    beside_vision: bool, stacked: bool
) -> None:
    table = models.table(models.parse_facts(MOE))
    prefix = "model.language_model." if beside_vision else "model."
    experts = ["gate_up_proj"] if stacked else ["0.gate_proj.weight", "0.up_proj.weight"]
    down = ["down_proj"] if stacked else ["0.down_proj.weight"]
    there = {
        name.replace("model.", prefix, 1)
        for name in table.hf_shapes()
        if ".mlp.experts." not in name
    }
    there |= {
        f"{prefix}layers.{layer}.mlp.experts.{name}"
        for layer in range(4)
        for name in (*experts, *down)
    }
    on_disk = {name.replace(".0.", ".E.") for name in table.as_on_disk(there).hf_shapes()}
    assert {name.replace(".0.", ".E.") for name in there} <= on_disk
    assert all(name.startswith((prefix, "lm_head")) for name in on_disk)


def test_the_mtp_layer_that_qwen3_next_does_not_tell_of_is_taken_where_it_is_there() -> None:
    table = models.table(models.parse_facts(NEXT))
    names = set(table.hf_shapes())
    assert {
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.layers.0.mlp.shared_expert_gate.weight",
    } <= names
    assert table.by_megatron["mtp.layers.0.eh_proj.weight"].hf == ("mtp.fc.weight",)
    without = {name for name in names if not name.startswith("mtp.")}
    assert set(table.as_on_disk(without).hf_shapes()) == without
    assert set(table.as_on_disk(names).hf_shapes()) == names


def test_decay_and_norm_stay_in_float32_where_the_release_says_so() -> None:
    for said, expected in ({"mamba_ssm_dtype": "float32"}, {"A_log", "norm"}), ({}, set()):
        entries = models.table(models.parse_facts({**TEXT, **said})).entries
        wide = {
            entry.hf[0].removesuffix(".weight").rpartition(".")[2]
            for entry in entries
            if entry.rule.float32
        }
        assert wide == expected


@pytest.mark.parametrize("config", [TEXT, NEXT], ids=["separate", "grouped"])
def test_projections_come_apart_and_together_bit_for_bit_whole_and_cut(config: dict) -> None:
    table = models.table(models.parse_facts(config))
    for name in ("in_proj.weight", "conv1d.weight"):
        entry = table.by_megatron[f"decoder.layers.0.self_attention.{name}"]
        disk = [torch.randn(shape) for shape in entry.shapes]
        parts = entry.rule.to_parts(disk, entry.facts)
        assert len(parts) == len(entry.rule.suffixes)
        cut = [
            entry.rule.fuse([part.chunk(2)[rank] for part in parts], entry.facts)
            for rank in range(2)
        ]
        again = [
            torch.cat(pair)
            for pair in zip(*(entry.rule.split(part, entry.facts) for part in cut), strict=True)
        ]
        back = entry.rule.to_disk(again, entry.facts)
        assert all(torch.equal(one, other) for one, other in zip(back, disk, strict=True))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(said: dict, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        models.parse_facts({**TEXT, **said})
