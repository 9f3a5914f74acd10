"""Family SmolLM3: Llama whose every fourth layer (or the layers that the config names) does not
rotate queries and keys."""

from __future__ import annotations

from collections.abc import Mapping

from milescli.models import fields
from milescli.models.facts import Layer, ModelFacts
from milescli.models.families import llama

table = llama.table


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `smollm3` config. Raises CheckpointError for what the trainer
    cannot compute."""
    fields.refuse(
        config,
        "use_sliding_window",
        unless=False,
        why="no release has windows, so miles could not verify them",
    )
    bias = fields.number(config, "attention_bias", default=False, kind=bool)
    return llama.plain_facts(
        config,
        family="smollm3",
        default_positions=32_768,
        layers=tuple(Layer(unrotated=not turns) for turns in _rotating_layers(config)),
        num_kv_heads=fields.number(config, "num_key_value_heads", default=4, kind=int),
        tied_embeddings=fields.number(config, "tie_word_embeddings", default=True, kind=bool),
        rope=fields.rope(config, theta=2_000_000.0),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=fields.number(config, "mlp_bias", default=False, kind=bool),
    )


def _rotating_layers(config: Mapping[str, object]) -> list[bool]:
    """Return [num_layers] booleans: True for a layer that rotates queries and keys."""
    num_layers = fields.number(config, "num_hidden_layers", kind=int)
    named = config.get("no_rope_layers")
    if named is None:
        every = fields.number(config, "no_rope_layer_interval", default=4, kind=int)
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if not isinstance(named, list) or len(named) < num_layers:
        raise fields.unusable_field(
            "no_rope_layers",
            why=f"{num_layers} layers need one number each, but it is {named!r}",
        )
    return [bool(turns) for turns in named[:num_layers]]
