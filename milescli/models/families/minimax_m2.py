"""Family MiniMax-M2, M2.5 and M2.7: experts in every layer, chosen by sigmoid with a correction,
without a shared one; queries and keys are normalised over all heads of a position together; half of
each head is rotated."""

from __future__ import annotations

from collections.abc import Mapping

from milescli.models import fields, layers
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts, plain_layers
from milescli.models.families import llama


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `minimax_m2` config. Raises CheckpointError for what the trainer
    cannot compute."""
    for name, usual in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")):
        fields.refuse(
            config, name, unless=usual, why="transformers computes this family in only one way"
        )
    num_layers = fields.number(config, "num_hidden_layers", kind=int)
    num_experts = fields.number(config, "num_local_experts", "num_experts", kind=int)
    head_dim = fields.number(config, "head_dim", default=128, kind=int)
    turned = fields.number(config, "rotary_dim", default=head_dim, kind=int)
    return llama.plain_facts(
        config,
        family="minimax_m2",
        default_positions=196_608,
        layers=plain_layers(num_layers, moe=(True,) * num_layers),
        head_dim=head_dim,
        ffn_hidden_size=0,
        num_kv_heads=fields.number(config, "num_key_value_heads", default=8, kind=int),
        rope=fields.rope(config, theta=5_000_000.0, default_share=turned / head_dim),
        qk_norm=True,
        qk_norm_over_heads=True,
        num_experts=num_experts,
        topk=fields.topk(config, "num_experts_per_tok", default=8, num_experts=num_experts),
        moe_ffn_hidden_size=fields.number(config, "intermediate_size", kind=int),
        normalize_topk=True,
        router_score="sigmoid",
        router_bias=True,
    )


_NAMES = {
    ".mlp.gate.e_score": ".block_sparse_moe.e_score",
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}
"""Names of families with gated experts -> this family's, in this order."""


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    experts = (layers.ROUTER, layers.ROUTER_BIAS, layers.EXPERT_UP, layers.EXPERT_DOWN)
    rules = (
        *llama.outside(facts),
        *llama.attention(facts),
        layers.MLP_NORM,
        *layers.renamed(experts, _NAMES),
    )
    return WeightTable(facts=facts, rules=rules, ignored=(llama.OLD_BUFFERS,))
