"""Facts from config.json, and the weight table: names, shapes, and transforms that undo each
other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from milescli import models
from milescli.core.errors import CheckpointError

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 101,
    "tie_word_embeddings": True,
}
MOE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def test_parameter_counts_are_those_of_the_releases() -> None:
    small = {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    facts = models.parse_facts({**DENSE, **small, "intermediate_size": 3072, "vocab_size": 151936})
    assert models.table(facts).num_parameters == 596_049_920, "Qwen3-0.6B"
    large = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    experts = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "tie_word_embeddings": False,
    }
    table = models.table(models.parse_facts({**MOE, **large, **experts, "vocab_size": 151936}))
    assert table.num_parameters == 30_532_122_624, "Qwen3-30B-A3B"
    assert table.num_active_parameters == 3_353_032_704


@pytest.mark.parametrize("config", [DENSE, MOE, {**DENSE, "tie_word_embeddings": False}])
def test_fuse_and_split_undo_each_other_whole_and_cut(config: dict) -> None:
    facts = models.parse_facts(config)
    for entry in models.table(facts).entries:
        tensors = [torch.randn(shape) for shape in entry.shapes]
        assert all(
            map(torch.equal, entry.rule.split(entry.rule.fuse(tensors, facts), facts), tensors)
        )
        sharding = entry.rule.sharding
        if sharding.axis == "none" or sharding.padded:
            continue
        for part in range(2):
            cut = [tensor.chunk(2, dim=sharding.dim)[part] for tensor in tensors]
            assert all(
                map(torch.equal, entry.rule.split(entry.rule.fuse(cut, facts), facts), cut)
            ), entry.megatron


def test_names_are_unique_on_both_sides() -> None:
    table = models.table(models.parse_facts(MOE))
    assert len(table.by_megatron) == len(table.entries)
    assert len(table.hf_shapes()) == sum(len(entry.hf) for entry in table.entries)


def test_layers_without_experts_are_dense() -> None:
    facts = models.parse_facts(
        {**MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    )
    assert [facts.is_moe_layer(layer) for layer in range(4)] == [False, True, False, False]
    names = models.table(facts).hf_shapes()
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    assert "model.layers.1.mlp.gate_proj.weight" not in names


def test_tied_models_have_no_output_layer_of_their_own() -> None:
    assert "lm_head.weight" not in models.table(models.parse_facts(DENSE)).hf_shapes()
    assert (
        "lm_head.weight"
        in models.table(models.parse_facts({**DENSE, "tie_word_embeddings": False})).hf_shapes()
    )


def test_old_and_new_configs_say_the_same() -> None:
    new = models.parse_facts(
        {
            **MOE,
            "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
            "dtype": "bfloat16",
        }
    )
    old = models.parse_facts(
        {**MOE, "rope_theta": 5000, "rope_scaling": None, "torch_dtype": "bfloat16"}
    )
    assert new == old
    renamed = {key: value for key, value in MOE.items() if key != "num_experts"} | {
        "num_local_experts": 4
    }
    assert models.parse_facts(renamed).num_experts == 4


def test_an_unknown_family_is_refused_with_the_nearest() -> None:
    with pytest.raises(CheckpointError, match="nearest is `qwen3_moe`"):
        models.parse_facts({**DENSE, "model_type": "qwen3moe"})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4}}, "dynamic"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "biases"),
    ],
)
def test_what_the_trainer_cannot_compute_is_refused_by_name(change: dict, word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        models.parse_facts({**DENSE, **change})


def test_more_chosen_experts_than_there_are_is_refused() -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok"):
        models.parse_facts({**MOE, "num_experts_per_tok": 9})


@pytest.mark.parametrize("content", [None, "{", "[1]", "\x00"])
def test_a_folder_without_a_readable_config_is_no_model(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError):
        models.load_facts(tmp_path)


def test_facts_and_tables_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    code = (
        "import sys; from milescli import models; f = models.load_facts(sys.argv[1]); "
        "models.table(f).hf_shapes(); "
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=200)
