"""Families of latent attention: which tensors their releases have or lack, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import CheckpointError, RecipeError
from milescli.models import WeightTable, parse_facts, table
from milescli.models.latent import with_indexer
from milescli.recipe.load import load
from tests.families.cases import ALL


def _table(name: str, **changes: object) -> WeightTable:
    return table(parse_facts({**ALL[name].config, **changes}))


def test_the_towers_of_kimi_k25_are_passed_through_and_its_text_is_not() -> None:
    table = _table("kimi-k25")
    names = table.hf_shapes()
    assert {
        "language_model.lm_head.weight",
        "language_model.model.layers.2.mlp.gate.weight",
    } <= names.keys()
    assert all(
        map(
            table.is_passthrough,
            ("vision_tower.patch_embed.proj.weight", "mm_projector.linear_1.weight"),
        )
    )
    assert not any(map(table.is_passthrough, names))


@pytest.mark.parametrize("copies", [True, False])
def test_a_layer_that_predicts_further_tokens_may_hold_copies_of_embedding_and_output_layer(
    copies: bool,
) -> None:
    table = _table("deepseek-v3-nextn")
    names = {
        name
        for name in table.hf_shapes()
        if copies or not name.endswith(("3.embed_tokens.weight", "shared_head.head.weight"))
    }
    on_disk = table.as_on_disk(names)
    assert on_disk.hf_shapes().keys() == names
    assert ("mtp.layers.0.embedding.word_embeddings.weight" in on_disk.by_megatron) is copies
    assert {
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.transformer_layer.self_attention.linear_kv_down_proj.weight",
    } <= (on_disk.by_megatron.keys())


def test_frequencies_that_old_releases_hold_are_ignored() -> None:
    assert _table("kimi-k2").is_ignored("model.layers.0.self_attn.rotary_emb.inv_freq")


def test_experts_that_transformers_makes_beyond_the_routers_reach_are_passed_through() -> None:
    table = _table("deepseek-v32")
    assert not table.is_passthrough("model.layers.1.mlp.experts.11.up_proj.weight")
    assert table.is_passthrough("model.layers.1.mlp.experts.12.up_proj.weight")


def test_layers_that_share_a_choice_have_no_indexer() -> None:
    names = _table("glm-moe-dsa-shared").hf_shapes()
    assert [f"model.layers.{layer}.self_attn.indexer.wk.weight" in names for layer in range(3)] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("name", ["deepseek-v32", "glm-moe-dsa-shared", "deepseek-v4"])
def test_the_trainer_changes_an_indexer_where_the_recipe_says_so(name: str) -> None:
    for mode in ("frozen", "kl"):
        weights = table(with_indexer(parse_facts(ALL[name].config), mode))
        fixed = {e.megatron for e in weights.entries if not weights.trains(e)}
        indexers = {e.megatron for e in weights.entries if ".indexer." in e.megatron}
        assert indexers and fixed == (indexers if mode == "frozen" else set())
        assert set(weights.without_frozen_tower().entries) == set(weights.entries), (
            "engines are sent all"
        )


def test_only_an_indexer_that_is_there_and_without_an_adapter_is_trained() -> None:
    facts = parse_facts(ALL["deepseek-v3"].config)
    assert with_indexer(facts, "frozen") == facts
    with pytest.raises(CheckpointError, match="no indexer that could be trained"):
        with_indexer(facts, "kl")
    sets = ["model.indexer=kl", "train.lora.rank=8"]
    with pytest.raises(RecipeError, match=r"model\.indexer=kl.* adapter"):
        load("glm-5", sets=sets, environ={}, cwd=Path("/"), home=Path("/"))


@pytest.mark.parametrize(
    ("freq", "expected"), [(1, [False] * 7), (3, [False, False, True, True, False, True, True])]
)
def test_the_step_between_choices_counts_from_the_second_layer(
    freq: int, expected: list[bool]
) -> None:
    facts = parse_facts(
        {**ALL["glm-moe-dsa"].config, "num_hidden_layers": 7, "index_topk_freq": freq}
    )
    assert [layer.shares_choice for layer in facts.layers] == expected


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("deepseek-v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek-v3", {"n_group": 5}, "n_group"),
        ("deepseek-v3", {"topk_group": 4}, "topk_group"),
        ("deepseek-v3", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (
            "deepseek-v3",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("deepseek-v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek-v32", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek-v32", {"index_head_dim": 4}, "index_head_dim"),
        ("glm-moe-dsa", {"indexer_types": ["shared", "full", "full"]}, "indexer_types"),
        ("glm-moe-dsa", {"index_kpool": 4}, "index_kpool"),
        ("deepseek-v32", {"index_local_tokens": 64}, "index_local_tokens"),
        ("kimi-k25", {"text_config": None}, "text_config"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_its_key(
    name: str, changes: dict, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        _table(name, **changes)
