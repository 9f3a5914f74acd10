"""Family GLM-4, dense: Llama with norms before and after each part, and half of each head rotated
in neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping

from milescli.models import fields, layers
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts
from milescli.models.families import llama

_POST_ATTENTION = layers.norm("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight")
_POST_MLP = layers.norm("post_mlp_layernorm.weight", "post_mlp_layernorm.weight")


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `glm4` config. Raises CheckpointError for what the trainer cannot
    compute."""
    return llama.plain_facts(
        config,
        family="glm4",
        default_positions=131_072,
        num_kv_heads=fields.number(config, "num_key_value_heads", default=2, kind=int),
        head_dim=fields.number(config, "head_dim", default=128, kind=int),
        norm_eps=fields.number(config, "rms_norm_eps", default=1.5625e-07, kind=float),
        qkv_bias=fields.number(config, "attention_bias", default=True, kind=bool),
        rope=fields.rope(config, default_share=0.5, interleaved=True),
        sandwich_norms=True,
    )


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    rules = (
        *llama.outside(facts),
        *llama.attention(facts),
        _POST_ATTENTION,
        layers.MLP_NORM,
        layers.FUSED_MLP_UP,
        layers.MLP_DOWN,
        _POST_MLP,
    )
    return WeightTable(facts=facts, rules=rules, ignored=(llama.OLD_BUFFERS,))
