"""Family Qwen3-MoE: Qwen3 whose layers (all, or those that the config names) have routed experts
without a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.models import fields, layers
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts, plain_layers
from milescli.models.families import qwen3


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `qwen3_moe` config. Raises CheckpointError for what the trainer
    cannot compute."""
    dense = qwen3.facts(config)
    num_experts = fields.number(config, "num_experts", "num_local_experts", kind=int)
    topk = fields.number(config, "num_experts_per_tok", kind=int)
    if not 1 <= topk <= num_experts:
        raise fields.unusable_field(
            "num_experts_per_tok",
            why=f"{topk} of {num_experts} experts cannot be chosen",
            fix="correct config.json",
        )
    return replace(
        dense,
        family="qwen3_moe",
        num_experts=num_experts,
        topk=topk,
        moe_ffn_hidden_size=fields.number(config, "moe_intermediate_size", kind=int),
        normalize_topk=fields.number(config, "norm_topk_prob", default=False, kind=bool),
        layers=plain_layers(dense.num_layers, moe=_moe_layers(config, num_layers=dense.num_layers)),
    )


def _moe_layers(config: Mapping[str, object], *, num_layers: int) -> tuple[bool, ...]:
    step = fields.number(config, "decoder_sparse_step", default=1, kind=int)
    dense = config.get("mlp_only_layers") or []
    assert isinstance(dense, list), dense
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    rules = (*qwen3.table(facts).rules, layers.ROUTER, layers.EXPERT_UP, layers.EXPERT_DOWN)
    return WeightTable(facts=facts, rules=rules)
