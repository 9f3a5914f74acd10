"""Family Solar Open: GLM-4.5 with experts in every layer, whole heads rotated, and no norm of
queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.models import fields
from milescli.models.facts import ModelFacts
from milescli.models.families import glm4_moe

table = glm4_moe.table


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `solar_open` config. Raises CheckpointError for what the trainer
    cannot compute."""
    num_layers = fields.number(config, "num_hidden_layers", kind=int)
    dense = {"first_k_dense_replace": 0, "intermediate_size": 0, "use_qk_norm": False}
    own = glm4_moe.facts({"head_dim": 128, **config, **dense})
    return replace(
        own,
        family="solar_open",
        layers=own.layers[:num_layers],
        rope=fields.rope(config, theta=1_000_000.0),
    )
