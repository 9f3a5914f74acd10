"""The families of plain attention: what their configs mean, which tensors their releases have, and
what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING

from milescli import models
from milescli.core.errors import CheckpointError
from tests.families.cases import ALL

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 40,
    "vocab_size": 131,
}
GLM = {
    **SIZES,
    "model_type": "glm4_moe",
    "first_k_dense_replace": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "num_nextn_predict_layers": 1,
}
COPIES = {"model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"}


CONFIGS = {str(case.config["model_type"]): case.config for case in ALL.values()}
"""One tiny config of each family."""


@pytest.mark.slow  # the import of transformers
@pytest.mark.parametrize("family", [name for name in CONFIGS if name in CONFIG_MAPPING])
def test_a_config_without_positions_has_the_default_of_transformers(family: str) -> None:
    config = copy.deepcopy(CONFIGS[family])
    for part in (config, config.get("text_config", {})):
        part.pop("max_position_embeddings", None)
    default = CONFIG_MAPPING[family]().get_text_config().max_position_embeddings
    assert models.parse_facts(config).max_position_embeddings == default


def test_windows_of_qwen2_begin_where_the_config_says() -> None:
    windows = {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 3,
    }
    facts = models.parse_facts({**SIZES, **windows})
    assert [layer.mixer for layer in facts.layers] == ["full", "full", "full", "sliding"]
    assert facts.sliding_window == 7
    without = models.parse_facts({**SIZES, **windows, "use_sliding_window": False})
    assert {layer.mixer for layer in without.layers} == {"full"}
    assert without.qkv_bias
    assert not without.attention_output_bias


@pytest.mark.parametrize(("window", "mixer"), [({}, "sliding"), ({"sliding_window": None}, "full")])
def test_mistral_has_its_window_unless_it_is_null(window: dict, mixer: str) -> None:
    facts = models.parse_facts({**SIZES, "model_type": "mistral", **window})
    assert {layer.mixer for layer in facts.layers} == {mixer}
    assert facts.sliding_window == (4096 if mixer == "sliding" else 0)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "llama", "pretraining_tp": 2}, "pretraining_tp"),
        ({"model_type": "llama", "num_key_value_heads": 2}, "num_key_value_heads"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        ({"model_type": "mimo", "attention_bias": False}, "attention_bias"),
        ({"model_type": "glm4", "hidden_act": "gelu"}, "hidden_act"),
        ({**GLM, "n_group": 4}, "n_group"),
        ({**GLM, "n_group": 6}, "n_group"),
        ({**GLM, "n_group": 3, "topk_group": 4}, "n_group"),
        ({**GLM, "n_group": 3, "topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ({**GLM, "scoring_func": "softmax"}, "scoring_func"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(config: dict, word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        models.parse_facts({**SIZES, **config})


def test_folders_may_lack_the_copies_of_embedding_and_head_or_all_of_the_mtp_layer() -> None:
    table = models.table(models.parse_facts(GLM))
    names = set(table.hf_shapes())
    assert names >= COPIES
    mtp = {name for name in names if name.startswith("model.layers.4.")}
    assert table.as_on_disk(names).hf_shapes().keys() == names
    assert table.as_on_disk(names - COPIES).hf_shapes().keys() == names - COPIES
    assert table.as_on_disk(names - mtp).hf_shapes().keys() == names - mtp
    torn = names - COPIES - {"model.layers.4.enorm.weight"}
    assert "model.layers.4.enorm.weight" in table.as_on_disk(torn).hf_shapes(), (
        "an MTP layer that is not whole is missing a tensor"
    )


def test_the_correction_of_the_router_is_no_parameter_and_stays_in_float32() -> None:
    table = models.table(models.parse_facts({**GLM, "num_nextn_predict_layers": 0}))
    entry = table.by_megatron["decoder.layers.3.mlp.router.expert_bias"]
    assert entry.rule.float32
    assert (
        table.num_parameters
        == sum(torch.Size(shape).numel() for shape in table.hf_shapes().values()) - 6
    )


def test_mimo_lays_hidden_state_and_embedding_the_other_way_round_than_megatron() -> None:
    config = {**SIZES, "model_type": "mimo", "num_nextn_predict_layers": 2}
    entry = models.table(models.parse_facts(config)).by_megatron["mtp.layers.1.eh_proj.weight"]
    assert entry.hf == ("model.mtp_layers.1.input_proj.weight",)
    hidden, embedding = torch.zeros(24, 24), torch.ones(24, 24)
    stored = torch.cat([hidden, embedding], dim=1)
    fused = entry.rule.fuse([stored], entry.facts)
    assert torch.equal(fused, torch.cat([embedding, hidden], dim=1))
    assert torch.equal(entry.rule.split(fused, entry.facts)[0], stored)
