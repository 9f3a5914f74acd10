"""Family Mistral: Llama, with a sliding window in all layers or in none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.core.errors import CheckpointError
from milescli.models import fields
from milescli.models.facts import Layer, ModelFacts
from milescli.models.families import llama


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `mistral` config. Raises CheckpointError for what the trainer
    cannot compute."""
    if config.get("layer_types") is not None:
        raise CheckpointError(
            "a mistral model with `layer_types` is not supported",
            why="Hugging Face's implementation ignores it: either every layer has the window, "
            "or none",
            fix="remove `layer_types` from config.json",
        )
    model = llama.plain_facts(
        config,
        family="mistral",
        default_positions=131_072,
        num_kv_heads=fields.number(config, "num_key_value_heads", default=8, kind=int),
    )
    # null means none, unlike a field that is left out
    if "sliding_window" in config and config["sliding_window"] is None:
        return model
    window = fields.number(config, "sliding_window", default=4096, kind=int)
    return replace(
        model, layers=(Layer(mixer="sliding"),) * model.num_layers, sliding_window=window
    )


table = llama.table
