"""Family Qwen2 (Qwen2.5, DeepSeek-R1-Distill-Qwen): Llama with biases of queries, keys and values,
and sliding windows in late layers if the config asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.core.errors import CheckpointError
from milescli.models import fields
from milescli.models.facts import Layer, ModelFacts
from milescli.models.families import llama


def facts(config: Mapping[str, object], *, family: str = "qwen2") -> ModelFacts:
    """Parse the ModelFacts of a `qwen2` config. Raises CheckpointError for what the trainer cannot
    compute."""
    model = llama.plain_facts(config, family=family, default_positions=32_768, qkv_bias=True)
    window = fields.number(config, "sliding_window", default=4096, kind=int)
    # null means none here, unlike a field that is left out
    uses_window = (
        fields.number(config, "use_sliding_window", default=False, kind=bool)
        and config.get("sliding_window", 0) is not None
    )
    first = fields.number(config, "max_window_layers", default=28, kind=int)
    by_number = tuple(
        "sliding" if uses_window and layer >= first else "full" for layer in range(model.num_layers)
    )
    mixers = fields.mixers(config, num_layers=model.num_layers, period=by_number)
    if "sliding" not in mixers:
        return model
    if not uses_window:
        raise CheckpointError(
            "config.json contradicts itself: `layer_types`",
            why="it has layers of sliding attention, but `use_sliding_window` says that there "
            "are none",
            fix="correct config.json",
        )
    return replace(
        model, layers=tuple(Layer(mixer=mixer) for mixer in mixers), sliding_window=window
    )


table = llama.table
