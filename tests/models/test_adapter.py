"""The table of an adapter: which matrices have one, how its tensors are cut, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from milescli.core.errors import CheckpointError, RecipeError
from milescli.models import parse_facts, table
from milescli.models.adapter import (
    ALL_LINEAR,
    SHAPE_FILE,
    LoraShape,
    adapter_table,
    pairs_of,
    read_shape,
    write_shape,
)
from tests.backends.megatron.tiny_models import MODELS

DENSE = table(parse_facts(MODELS["dense"]))
MOE = table(parse_facts(MODELS["moe"]))
ALL = LoraShape(rank=4, alpha=8, targets=(ALL_LINEAR,))


def test_each_matrix_of_the_layers_has_a_pair_and_nothing_else() -> None:
    modules = list(pairs_of(adapter_table(DENSE, ALL)))
    leaves = {module.rpartition(".")[2] for module in modules}
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(modules) == 7 * DENSE.facts.num_layers


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"v4", "mtpv4"}))
def test_targets_that_an_error_offers_are_accepted(name: str) -> None:
    base = table(parse_facts(MODELS[name]))
    with pytest.raises(RecipeError, match="no matrix of this model matches") as caught:
        adapter_table(base, replace(ALL, targets=("nothing",)))
    offered = caught.value.fixes[0].partition("[")[2].partition("]")[0].split(", ")
    made = adapter_table(base, replace(ALL, targets=tuple(offered)))
    assert list(pairs_of(made)) == list(pairs_of(adapter_table(base, ALL)))


def test_shapes_follow_the_matrix() -> None:
    shapes = adapter_table(DENSE, ALL).hf_shapes()
    module = "base_model.model.model.layers.0.self_attn.k_proj"
    assert shapes[f"{module}.lora_A.weight"] == (4, 64)
    assert shapes[f"{module}.lora_B.weight"] == (32, 4)


def test_what_cuts_rows_cuts_b_and_what_cuts_columns_cuts_a() -> None:
    rules = {rule.megatron.split(".", 3)[3]: rule for rule in adapter_table(DENSE, ALL).rules}
    cuts = {name: (rule.sharding.axis, rule.sharding.dim) for name, rule in rules.items()}
    assert cuts["self_attention.linear_qkv.lora_A.q_proj"][0] == "none"
    assert cuts["self_attention.linear_qkv.lora_B.q_proj"] == ("tp", 0)
    assert cuts["self_attention.linear_proj.lora_A.o_proj"] == ("tp", 1)
    assert cuts["self_attention.linear_proj.lora_B.o_proj"][0] == "none"


def test_experts_have_pairs_of_their_own_and_routers_none() -> None:
    modules = list(pairs_of(adapter_table(MOE, ALL)))
    assert "model.layers.1.mlp.experts.3.down_proj" in modules
    assert not any(module.endswith("mlp.gate") for module in modules)


def test_experts_share_what_reads_and_writes_the_residual_stream() -> None:
    shape = replace(ALL, experts="shared_outer")
    made, each = adapter_table(MOE, shape), adapter_table(MOE, ALL)
    assert list(pairs_of(made)) == list(pairs_of(each))
    sizes, experts = made.hf_shapes(), MOE.facts.num_experts
    module = "base_model.model.model.layers.1.mlp.experts"
    inner, hidden = MOE.facts.moe_ffn_hidden_size, MOE.facts.hidden_size
    assert sizes[f"{module}.up_proj.lora_A.weight"] == (1, 4, hidden)
    assert sizes[f"{module}.up_proj.lora_B.weight"] == (experts, inner, 4)
    assert sizes[f"{module}.down_proj.lora_A.weight"] == (experts, 4, inner)
    assert sizes[f"{module}.down_proj.lora_B.weight"] == (1, hidden, 4)
    first, second = pairs_of(made)["model.layers.1.mlp.experts.3.down_proj"]
    assert (first.row, second.row) == (3, 0)
    layers = MOE.facts.num_moe_layers
    saved = layers * (experts - 1) * 3 * 4 * hidden
    assert each.num_parameters - made.num_parameters == saved


def test_a_model_without_experts_shares_nothing() -> None:
    with pytest.raises(RecipeError, match="does not apply to any expert"):
        adapter_table(DENSE, replace(ALL, experts="shared_outer"))


def test_what_is_excluded_has_none() -> None:
    shape = LoraShape(rank=4, alpha=8, targets=(ALL_LINEAR,), exclude=("experts", "k_proj"))
    modules = list(pairs_of(adapter_table(MOE, shape)))
    assert modules and not any(".experts." in m or m.endswith("k_proj") for m in modules)


@pytest.mark.parametrize("targets", [("q_proj", "c_attn"), ("gate",)])
def test_a_target_that_names_nothing_is_refused(targets: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError, match=targets[-1]) as raised:
        adapter_table(MOE, LoraShape(rank=4, alpha=8, targets=targets))
    assert "q_proj" in raised.value.why


def test_scaling_is_that_of_the_papers() -> None:
    assert ALL.scaling == 2.0
    assert LoraShape(rank=16, alpha=8, targets=("q_proj",), kind="rslora").scaling == 2.0


def test_a_shape_comes_back_as_it_was(tmp_path: Path) -> None:
    assert read_shape(tmp_path) is None
    shape = LoraShape(rank=4, alpha=8, targets=("q_proj",), exclude=("layers.0",), kind="rslora")
    write_shape(tmp_path, shape, base="of a base")
    assert read_shape(tmp_path) == (shape, "of a base")
    (tmp_path / SHAPE_FILE).write_text('{"rank": 4}')
    with pytest.raises(CheckpointError, match=SHAPE_FILE):
        read_shape(tmp_path)
