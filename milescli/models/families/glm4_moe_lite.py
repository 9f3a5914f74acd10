"""Family GLM-4.7-Flash: DeepSeek-V3's architecture in GLM's sizes."""

from __future__ import annotations

from collections.abc import Mapping

from milescli.models import latent
from milescli.models.facts import ModelFacts

DEFAULTS: dict[str, object] = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202_752,
}
"""transformers' defaults for fields that config.json omits."""


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `glm4_moe_lite` config. Raises CheckpointError for what the trainer
    cannot compute."""
    full = {**DEFAULTS, **config}
    return latent.facts(full, family="glm4_moe_lite", dense=latent.dense_first(full))


table = latent.table
