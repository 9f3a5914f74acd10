"""Family Llama (Llama 3.x and models distilled into it): grouped attention, gated MLP. Also holds
what other plain families share with it."""

from __future__ import annotations

from collections.abc import Mapping

from milescli.models import fields, layers
from milescli.models.base import Rule, WeightTable
from milescli.models.facts import ModelFacts, plain_layers

OLD_BUFFERS = r"\.rotary_emb\.inv_freq$"
"""Pattern of rotary frequencies, which old releases store in every layer although they follow from
config.json."""


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `llama` config. Raises CheckpointError for what the trainer cannot
    compute."""
    fields.refuse(
        config,
        "pretraining_tp",
        unless=1,
        why="the trainer multiplies whole matrices, which rounds differently",
    )
    bias = fields.number(config, "attention_bias", default=False, kind=bool)
    return plain_facts(
        config,
        family="llama",
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=fields.number(config, "mlp_bias", default=False, kind=bool),
    )


def plain_facts(
    config: Mapping[str, object],
    *,
    family: str,
    default_positions: int = 2048,
    **known: object,
) -> ModelFacts:
    """Parse the facts of a decoder with grouped attention and gated SiLU from the fields that all
    such configs have. `default_positions` applies to a config without `max_position_embeddings`, as
    transformers has it for the family; `known` holds fields of ModelFacts that the family fixes.
    Raises CheckpointError for fields that are missing or impossible."""
    fields.refuse(
        config,
        "hidden_act",
        unless="silu",
        why="releases of this family use gated SiLU, and nothing else was verified",
    )
    hidden_size = fields.number(config, "hidden_size", kind=int)
    num_heads = fields.number(config, "num_attention_heads", kind=int)
    num_layers = fields.number(config, "num_hidden_layers", kind=int)
    read: dict[str, object] = {
        "num_layers": num_layers,
        "layers": plain_layers(num_layers),
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": fields.number(config, "num_key_value_heads", default=num_heads, kind=int),
        "head_dim": fields.number(config, "head_dim", default=hidden_size // num_heads, kind=int),
        "ffn_hidden_size": fields.number(config, "intermediate_size", kind=int),
        "vocab_size": fields.number(config, "vocab_size", kind=int),
        "tied_embeddings": fields.number(config, "tie_word_embeddings", default=False, kind=bool),
        "norm_eps": fields.number(config, "rms_norm_eps", default=1e-6, kind=float),
        "max_position_embeddings": fields.number(
            config, "max_position_embeddings", default=default_positions, kind=int
        ),
        "qk_norm": False,
        "qkv_bias": False,
        "dtype": fields.dtype(config),
        "eos_token_ids": fields.eos_token_ids(config),
    }
    if "rope" not in known:
        read["rope"] = fields.rope(config)
    model = ModelFacts(family=family, **{**read, **known})  # type: ignore[arg-type]
    if model.num_kv_heads < 1 or model.num_heads % model.num_kv_heads:
        raise fields.unusable_field(
            "num_key_value_heads",
            why=f"{model.num_heads} query heads cannot share {model.num_kv_heads} key-value heads "
            "equally",
        )
    return model


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    rules = (*outside(facts), *attention(facts), *mlp(facts))
    return WeightTable(facts=facts, rules=rules, ignored=(OLD_BUFFERS,))


def outside(facts: ModelFacts) -> tuple[Rule, ...]:
    """Return the rules of the embedding, the final norm, and the output layer if it is not tied."""
    output = () if facts.tied_embeddings else (layers.OUTPUT_LAYER,)
    return (layers.EMBEDDING, layers.FINAL_NORM, *output)


def attention(facts: ModelFacts) -> tuple[Rule, ...]:
    """Return the rules of the norm before attention, of its projections and biases, and of its own
    norms."""
    norms = (layers.QUERY_NORM, layers.KEY_NORM)
    if facts.qk_norm_over_heads:
        norms = (layers.QUERY_NORM_OVER_HEADS, layers.KEY_NORM_OVER_HEADS)
    return (
        layers.INPUT_NORM,
        layers.QKV,
        *((layers.QKV_BIAS,) if facts.qkv_bias else ()),
        *(norms if facts.qk_norm else ()),
        layers.ATTENTION_OUTPUT,
        *((layers.ATTENTION_OUTPUT_BIAS,) if facts.attention_output_bias else ()),
    )


def mlp(facts: ModelFacts) -> tuple[Rule, ...]:
    """Return the rules of the norm before the MLP, and of gate, up and down with their biases."""
    biases = (layers.MLP_UP_BIAS, layers.MLP_DOWN_BIAS) if facts.mlp_bias else ()
    return (layers.MLP_NORM, layers.MLP_UP, layers.MLP_DOWN, *biases)
