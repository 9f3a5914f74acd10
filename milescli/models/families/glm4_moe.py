"""Family GLM-4.5, 4.6 and 4.7: first dense layers, then layers with one shared expert and
experts that are chosen by sigmoid with a correction; at the end, layers that predict further
tokens (MTP)."""

from __future__ import annotations

from collections.abc import Mapping

from milescli.models import fields, layers
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts, plain_layers
from milescli.models.families import llama


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `glm4_moe` config. Raises CheckpointError for what the trainer
    cannot compute."""
    fields.refuse(
        config,
        "scoring_func",
        unless="sigmoid",
        why="Hugging Face's implementation only scores experts by sigmoid",
    )
    num_layers = fields.number(config, "num_hidden_layers", kind=int)
    num_experts = fields.number(config, "n_routed_experts", "num_local_experts", kind=int)
    num_dense = fields.number(config, "first_k_dense_replace", default=1, kind=int)
    num_groups = fields.number(config, "n_group", default=1, kind=int)
    topk_groups = fields.number(config, "topk_group", default=1, kind=int)
    _check_groups(num_experts=num_experts, num_groups=num_groups, topk_groups=topk_groups)
    expert_size = fields.number(config, "moe_intermediate_size", kind=int)
    return llama.plain_facts(
        config,
        family="glm4_moe",
        default_positions=131_072,
        layers=plain_layers(
            num_layers, moe=tuple(layer >= num_dense for layer in range(num_layers))
        ),
        num_kv_heads=fields.number(config, "num_key_value_heads", default=8, kind=int),
        norm_eps=fields.number(config, "rms_norm_eps", default=1e-5, kind=float),
        qkv_bias=fields.number(config, "attention_bias", default=False, kind=bool),
        qk_norm=fields.number(config, "use_qk_norm", default=False, kind=bool),
        rope=fields.rope(config, default_share=0.5),
        num_experts=num_experts,
        topk=fields.topk(
            config,
            "num_experts_per_tok",
            default=8,
            num_experts=num_experts // num_groups * topk_groups,
        ),
        moe_ffn_hidden_size=expert_size,
        normalize_topk=fields.number(config, "norm_topk_prob", default=True, kind=bool),
        shared_expert_ffn_hidden_size=expert_size
        * fields.number(config, "n_shared_experts", default=1, kind=int),
        router_score="sigmoid",
        router_bias=True,
        router_groups=num_groups,
        router_topk_groups=topk_groups,
        router_scaling=fields.number(config, "routed_scaling_factor", default=1.0, kind=float),
        num_mtp_layers=fields.number(config, "num_nextn_predict_layers", default=0, kind=int),
    )


def _check_groups(*, num_experts: int, num_groups: int, topk_groups: int) -> None:
    if (
        num_groups < 1
        or num_experts % num_groups
        or not 1 <= topk_groups <= num_groups
        or num_experts // num_groups < 2
    ):
        raise fields.unusable_field(
            "n_group",
            why=f"{topk_groups} of {num_groups} equal groups, each of at least two of "
            f"{num_experts} experts, cannot be chosen",
        )


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    experts = (
        layers.ROUTER,
        layers.ROUTER_BIAS,
        layers.EXPERT_UP,
        layers.EXPERT_DOWN,
        layers.SHARED_UP,
        layers.SHARED_DOWN,
    )
    rules = (
        *llama.outside(facts),
        *llama.attention(facts),
        *llama.mlp(facts),
        *experts,
        *layers.MTP_FRAME,
        *layers.in_mtp((*llama.attention(facts), layers.MLP_NORM, *experts)),
    )
    return WeightTable(facts=facts, rules=rules, ignored=(llama.OLD_BUFFERS,))
