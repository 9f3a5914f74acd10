"""Which tensors are quantised: what is never, what each format keeps, and what engines hold
together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from milescli.core.errors import CheckpointError
from milescli.models import parse_facts, table
from milescli.models.precision import (
    FORMATS,
    Cut,
    choose,
    modules_left_plain,
    with_single_experts,
)
from milescli.recipe.templates import shipped_shape
from tests.export.models import DEEPSEEK_V3, GPT_OSS, QWEN3, QWEN3_MOE, table_of

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "configs"
NEVER = (
    "norm.weight",
    "embed_tokens.weight",
    "lm_head.weight",
    "mlp.gate.weight",
    "e_score_correction_bias",
    "eh_proj.weight",
    "A_log",
    "conv1d.weight",
)


def quantised(config: dict[str, object], form: str) -> set[str]:
    """Names without layer and expert numbers."""
    choices = choose(
        with_single_experts(table_of(config)) if form != "mxfp4" else table_of(config), form
    )
    return {
        choice.name.split(".", 3)[-1] if ".experts." not in choice.name else "experts"
        for choice in choices.values()
        if choice.form
    }


def test_fp8_takes_every_linear_layer_and_nothing_else() -> None:
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    mlp = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    sizes = {"head_dim": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    assert quantised({**QWEN3, **sizes}, "fp8") == attention | mlp
    assert quantised({**QWEN3_MOE, **sizes}, "fp8") == attention | mlp | {"experts"}
    latent = {
        f"self_attn.{name}.weight"
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    }
    shared = {f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert quantised({**DEEPSEEK_V3, **sizes}, "fp8") == latent | mlp | shared | {"experts"}


def test_int4_takes_routed_experts_alone_where_there_are_some() -> None:
    assert quantised(QWEN3_MOE, "int4") == {"experts"}
    assert quantised(DEEPSEEK_V3, "int4") == {"experts"}
    assert "self_attn.q_proj.weight" in quantised(QWEN3, "int4")


def test_nvfp4_keeps_latent_attention() -> None:
    assert not any("self_attn" in name for name in quantised(DEEPSEEK_V3, "nvfp4"))
    assert any("self_attn" in name for name in quantised(QWEN3_MOE, "nvfp4"))


def test_nvfp4_keeps_what_sglang_builds_plain_in_qwen3_next() -> None:
    config = shipped_shape("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert config is not None
    names = {
        name
        for name, choice in choose(with_single_experts(table_of(config)), "nvfp4").items()
        if choice.form and ".self_attn." in name
    }
    assert names and all(name.endswith("o_proj.weight") for name in names)


def test_mxfp4_is_for_the_stacked_experts_of_gpt_oss() -> None:
    choices = choose(table_of(GPT_OSS), "mxfp4")
    quantised = {choice.name for choice in choices.values() if choice.form}
    assert quantised == {
        f"model.layers.{layer}.mlp.experts.{name}_proj"
        for layer in (0, 1)
        for name in ("gate_up", "down")
    }
    with pytest.raises(CheckpointError, match="can be stored as MXFP4"):
        choose(table_of(QWEN3_MOE), "mxfp4")
    for form in ("fp8", "mxfp8", "int4", "nvfp4"):
        with pytest.raises(CheckpointError, match="without a format"):
            choose(table_of(GPT_OSS), form)


def test_every_tensor_that_stays_plain_has_a_reason() -> None:
    for config in (QWEN3, QWEN3_MOE, DEEPSEEK_V3):
        for choice in choose(with_single_experts(table_of(config)), "nvfp4").values():
            assert bool(choice.reason) is (choice.form is None), choice


def test_uneven_matrices_stay_plain_with_all_that_is_fused_with_them() -> None:
    """200 rows are two blocks, of which transformers would make two of 100."""
    choices = choose(table_of({**QWEN3, "num_attention_heads": 5, "head_dim": 40}), "fp8")
    layer = "model.layers.0.self_attn."
    assert "200 rows are no multiple of 128" in choices[layer + "q_proj.weight"].reason
    assert choices[layer + "k_proj.weight"].form is None
    assert choices["model.layers.0.mlp.down_proj.weight"].form is not None


def test_experts_of_a_layer_are_quantised_all_or_not_at_all() -> None:
    with pytest.raises(CheckpointError, match="no weight") as caught:
        choose(table_of({**QWEN3_MOE, "moe_intermediate_size": 40}), "int4")
    assert (
        "no multiple of 32" in caught.value.why or "engines hold in one tensor" in caught.value.why
    )


def test_a_model_without_a_fitting_matrix_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        choose(
            table_of(
                {
                    **QWEN3,
                    "hidden_size": 36,
                    "intermediate_size": 20,
                    "head_dim": 9,
                    "num_attention_heads": 4,
                }
            ),
            "int4",
        )
    assert "no multiple of 32" in caught.value.why and caught.value.fixes == ["--format bf16"]


def test_the_configs_list_names_modules_once() -> None:
    plain = modules_left_plain(choose(table_of(DEEPSEEK_V3), "int4"), table_of(DEEPSEEK_V3).facts)
    assert (
        "lm_head" in plain and "model.layers.1.mlp.gate" in plain and len(plain) == len(set(plain))
    )
    assert not any("experts.0" in name or name.endswith("norm") for name in plain)
    tied = table_of(QWEN3)
    assert "lm_head" in modules_left_plain(choose(tied, "fp8"), tied.facts), (
        "readers make a module of a tied output layer too"
    )


def test_a_fused_group_is_quantised_only_where_every_part_is_whole_blocks() -> None:
    """SGLang fuses q, k and v, and refuses partial blocks of any; k has 32 rows."""
    layer = "model.layers.0.self_attn."
    choices = choose(table_of(QWEN3), "fp8")
    assert "32 rows are no multiple of 128" in choices[layer + "k_proj.weight"].reason
    assert choices[layer + "q_proj.weight"].form is None
    assert choices[layer + "o_proj.weight"].form == "fp8"
    whole = {**QWEN3, "head_dim": 128, "intermediate_size": 256}
    assert choose(table_of(whole), "fp8")[layer + "k_proj.weight"].form == "fp8"


@pytest.mark.parametrize(
    ("form", "cut", "quantised"),
    [
        ("fp8", Cut(), {"qkv", "o", "gate_up", "down"}),
        ("fp8", Cut(dense=2), {"qkv", "o", "gate_up", "down"}),
        ("fp8", Cut(dense=4), {"o", "gate_up", "down"}),
        ("fp8", Cut(dense=8), set()),
        ("int4", Cut(dense=8), {"qkv", "o", "gate_up", "down"}),
        ("int4", Cut(dense=32), {"qkv", "gate_up"}),
    ],
)
def test_no_cut_goes_through_a_block(form: str, cut: Cut, quantised: set[str]) -> None:
    """q 512, k and v 256 rows; o 512, down 512 columns; gate and up 512 rows; 256 wide."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    table = table_of({**QWEN3, **sizes, "head_dim": 128, "intermediate_size": 512})
    names = {"q_proj": "qkv", "o_proj": "o", "gate_proj": "gate_up", "down_proj": "down"}
    if not quantised:
        with pytest.raises(CheckpointError, match="no weight"):
            choose(table, form, cuts=[Cut(), cut])
        return
    choices = choose(table, form, cuts=[Cut(), cut])
    layer = {
        name.split(".")[-2]: choice for name, choice in choices.items() if ".layers.0." in name
    }
    assert {short for name, short in names.items() if layer[name].form} == quantised


def test_the_cuts_of_both_sides_fall_on_blocks() -> None:
    """1920 rows over 2 ranks cut the block at 960, although 3 ranks cut at whole blocks."""
    sizes = {"hidden_size": 768, "num_attention_heads": 6, "num_key_value_heads": 6}
    table = table_of({**QWEN3, **sizes, "head_dim": 128, "intermediate_size": 1920})
    both = choose(table, "fp8", cuts=[Cut(dense=2), Cut(dense=3)])
    for leaf in ("gate_proj", "down_proj"):
        choice = both[f"model.layers.0.mlp.{leaf}.weight"]
        assert choice.form is None and "over 2 ranks are no multiple of 128" in choice.reason
    assert both["model.layers.0.self_attn.o_proj.weight"].form == "fp8", "768 over 2, and over 3"


def test_a_recipe_exempts_modules_by_name() -> None:
    table = table_of({**QWEN3, "head_dim": 128, "intermediate_size": 256})
    choices = choose(table, "fp8", exempt=[r"layers\.0\.mlp"])
    assert choices["model.layers.0.mlp.down_proj.weight"].reason == "the recipe exempts it"
    assert choices["model.layers.1.mlp.down_proj.weight"].form == "fp8"


def test_bytes_count_numbers_and_scales() -> None:
    assert FORMATS["fp8"].bytes_of((256, 384)) == 256 * 384 + 2 * 3 * 4
    assert FORMATS["int4"].bytes_of((8, 64, 64)) == 8 * (64 * 64 // 2 + 64 * 2 * 2)


@pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="the published configs are not beside the repository"
)
@pytest.mark.parametrize("form", ["fp8", "mxfp8", "int4", "nvfp4"])
def test_published_models_never_lose_what_releases_keep(form: str) -> None:
    """One model of each family, cut to its first layers."""
    seen: set[str] = set()
    for file in sorted(PUBLISHED.glob("*.json")):
        try:
            facts = parse_facts(json.loads(file.read_text()))
        except CheckpointError:
            continue
        if facts.family in seen or facts.family in ("gpt_oss", "deepseek_v4"):
            continue
        few = min(facts.num_layers, 8)
        facts = replace(
            facts, num_layers=few, layers=facts.layers[:few], num_experts=min(facts.num_experts, 4)
        )
        seen.add(facts.family)
        if facts.family == "gemma4" and form == "int4":
            continue  # its experts lie stacked
        choices = choose(with_single_experts(table(facts)), form)
        lost = [
            name
            for name, choice in choices.items()
            if choice.form and (name.endswith(NEVER) or len(choice.shape) != 2)
        ]
        assert not lost, (facts.family, lost[:3])
        assert any(choice.form for choice in choices.values()), facts.family
    assert len(seen) > 8
