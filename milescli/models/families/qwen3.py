"""Family Qwen3: grouped attention with per-head query and key norms, gated MLP. Facts from its
config, and its weight table."""

from __future__ import annotations

from collections.abc import Mapping

from milescli.core.errors import CheckpointError
from milescli.models import fields, layers
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts
from milescli.models.families import llama


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
    return llama.plain_facts(
        config,
        family="qwen3",
        default_positions=32_768,
        qk_norm=True,
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
