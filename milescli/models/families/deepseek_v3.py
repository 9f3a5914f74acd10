"""Family DeepSeek-V3 (R1, V3, Moonlight): multi-head latent attention, sigmoid routing in groups,
shared experts, multi-token prediction."""

from __future__ import annotations

from collections.abc import Mapping

from milescli.models import latent
from milescli.models.facts import ModelFacts

DEFAULTS: dict[str, object] = {
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}
"""transformers' defaults for fields that config.json omits."""


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `deepseek_v3` config. Raises CheckpointError for what the trainer
    cannot compute."""
    full = {**DEFAULTS, **config}
    return latent.facts(full, family="deepseek_v3", dense=latent.dense_first(full))


table = latent.table
