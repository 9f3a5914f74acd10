"""Family DeepSeek-V3.2: V3 whose attention sees only the positions that a small indexer chooses
(DSA)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.models import fields, latent
from milescli.models.base import WeightTable
from milescli.models.facts import Indexer, ModelFacts
from milescli.models.families import deepseek_v3

DEFAULTS: dict[str, object] = {
    **deepseek_v3.DEFAULTS,
    "max_position_embeddings": 163_840,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
"""transformers' defaults for fields that config.json omits."""


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `deepseek_v32` config. Raises CheckpointError for what the trainer
    cannot compute."""
    full = {**DEFAULTS, **config}
    return latent.facts(
        full, family="deepseek_v32", dense=latent.dense_first(full), indexer=indexer(full)
    )


_USUAL = {
    "index_kpool": 1,
    "index_k_norm_type": "layer",
    "index_init_tokens": 0,
    "index_local_tokens": 0,
}
"""Fields of later models of this kind, with the only values that are supported: with others, SGLang
chooses other positions."""


def indexer(config: Mapping[str, object]) -> Indexer:
    """Parse the sizes of the indexer. Raises CheckpointError if it pools or adds positions. It
    rotates its first dims in halves, unlike the attention, unless GLM's key says otherwise: SGLang
    reads that key, transformers 5.12.1 does not."""
    for name, usual in _USUAL.items():
        fields.refuse(config, name, unless=usual, why="the trainer would choose other positions")
    return Indexer(
        num_heads=fields.number(config, "index_n_heads", kind=int),
        head_dim=fields.number(config, "index_head_dim", kind=int),
        topk=fields.number(config, "index_topk", kind=int),
        rope_interleaved=fields.number(config, "indexer_rope_interleave", default=False, kind=bool),
    )


def table(facts: ModelFacts) -> WeightTable:
    """Map every weight. transformers 5.12.1 takes the number of experts from `num_experts`, which
    is 256 if config.json has only `n_routed_experts`: experts of such a folder beyond the router's
    range are passed through."""
    reached = "|".join(str(expert) for expert in range(facts.num_experts))
    return replace(latent.table(facts), passthrough=(rf"\.mlp\.experts\.(?!(?:{reached})\.)\d+\.",))
