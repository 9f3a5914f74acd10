"""Qwen3: grouped attention with per-head query and key norms, gated MLP. Facts from its config, and
its weight table."""

from __future__ import annotations

from collections.abc import Mapping

from milescli.core.errors import CheckpointError
from milescli.models import fields, layers
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts, plain_layers


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `qwen3` config. Raises CheckpointError for what the trainer cannot
    compute."""
    fields.refuse(config, "hidden_act", unless="silu", why="the trainer only computes gated SiLU")
    fields.refuse(
        config,
        "use_sliding_window",
        unless=False,
        why="no release of qwen3 has windows, so miles could not verify them",
    )
    if fields.number(config, "attention_bias", default=False, kind=bool):
        raise CheckpointError(
            "a qwen3 model with attention biases is not supported",
            why="no release has them, so miles could not verify them",
            fix="use a model with `attention_bias: false`",
        )
    hidden_size = fields.number(config, "hidden_size", kind=int)
    num_heads = fields.number(config, "num_attention_heads", kind=int)
    num_layers = fields.number(config, "num_hidden_layers", kind=int)
    return ModelFacts(
        family="qwen3",
        num_layers=num_layers,
        layers=plain_layers(num_layers),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.number(config, "num_key_value_heads", default=num_heads, kind=int),
        head_dim=fields.number(config, "head_dim", default=hidden_size // num_heads, kind=int),
        ffn_hidden_size=fields.number(config, "intermediate_size", kind=int),
        vocab_size=fields.number(config, "vocab_size", kind=int),
        tied_embeddings=fields.number(config, "tie_word_embeddings", default=False, kind=bool),
        rope=fields.rope(config),
        norm_eps=fields.number(config, "rms_norm_eps", default=1e-6, kind=float),
        max_position_embeddings=fields.number(
            config, "max_position_embeddings", default=32_768, kind=int
        ),
        qk_norm=True,
        qkv_bias=False,
        dtype=fields.dtype(config),
        eos_token_ids=fields.eos_token_ids(config),
    )


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    rules = (
        layers.EMBEDDING,
        layers.INPUT_NORM,
        layers.QKV,
        layers.QUERY_NORM,
        layers.KEY_NORM,
        layers.ATTENTION_OUTPUT,
        layers.MLP_NORM,
        layers.MLP_UP,
        layers.MLP_DOWN,
        layers.FINAL_NORM,
        *(() if facts.tied_embeddings else (layers.OUTPUT_LAYER,)),
    )
    return WeightTable(facts=facts, rules=rules)
