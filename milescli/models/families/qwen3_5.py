"""Family Qwen3.5 and Qwen3.6, dense: gated delta nets, with gated full attention every few layers.
The text model alone, or within a multimodal release, whose vision tower is passed through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.models import gated_delta, hybrid
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `qwen3_5` or `qwen3_5_text` config. Raises CheckpointError for what
    the trainer cannot compute."""
    return hybrid.nested(hybrid.facts(hybrid.text_config(config), family="qwen3_5"), config)


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight. For text alone, all sections of M-RoPE have the
    positions of a plain rotary embedding."""
    plain = hybrid.table(facts, in_proj=gated_delta.SEPARATE_IN_PROJ)
    return replace(plain, rules=hybrid.either_prefix(facts, plain.rules), passthrough=hybrid.VISION)
