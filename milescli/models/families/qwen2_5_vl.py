"""Family Qwen2.5-VL: the decoder of Qwen2 with multimodal rotary positions, after a vision tower
whose blocks attend within windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.models import hybrid, layers, vision
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts
from milescli.models.families import qwen2


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `qwen2_5_vl` config, whose text fields may be in a `text_config` or
    beside the `vision_config`. Raises CheckpointError for what the trainer cannot compute."""
    text = hybrid.text_config(config)
    model = qwen2.facts(vision.text_rope_config(text), family="qwen2_5_vl")
    return replace(
        model,
        rope=vision.multimodal_rope(model.rope, text, head_dim=model.head_dim, interleaved=False),
        vision=vision.vision(config, tower="qwen2_5_vl", hidden_size=model.hidden_size),
        multimodal=True,
    )


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight. transformers has the decoder under other names
    in memory, which folders of other programs may have."""
    assert facts.vision is not None
    plain = qwen2.table(facts)
    in_memory = layers.prefixed(plain.rules, "model.language_model.")
    decoder = tuple(
        rule if rule.hf == other.hf else replace(rule, alternatives=(other,))
        for rule, other in zip(plain.rules, in_memory, strict=True)
    )
    towers = zip(
        vision.rules(facts.vision, hf="visual."),
        vision.rules(facts.vision, hf="model.visual."),
        strict=True,
    )
    tower = tuple(replace(rule, alternatives=(other,)) for rule, other in towers)
    return replace(plain, rules=(*tower, *decoder))
