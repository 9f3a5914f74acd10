"""Family GLM-5 and 5.1: DeepSeek-V3.2's architecture in GLM's sizes; a layer may reuse the
positions that the layer before chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.models import fields, latent
from milescli.models.facts import ModelFacts
from milescli.models.families import deepseek_v32

DEFAULTS: dict[str, object] = {
    **deepseek_v32.DEFAULTS,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202_752,
    "index_n_heads": 32,
}
"""transformers' defaults for fields that config.json omits."""
_KINDS = {"F": "full", "S": "shared"}


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `glm_moe_dsa` config. Raises CheckpointError for what the trainer
    cannot compute."""
    full = {**DEFAULTS, **config}
    model = latent.facts(
        full,
        family="glm_moe_dsa",
        dense=latent.dense_first(full),
        indexer=deepseek_v32.indexer(full),
    )
    shares = _shares_choice(config, num_layers=model.num_layers)
    layers = tuple(
        replace(layer, shares_choice=shared)
        for layer, shared in zip(model.layers, shares, strict=True)
    )
    return replace(model, layers=layers)


def _shares_choice(config: Mapping[str, object], *, num_layers: int) -> tuple[bool, ...]:
    """Return [num_layers] booleans: True for a layer that reuses the positions of the layer before.
    They come from `indexer_types`, or `index_topk_pattern`, or the step `index_topk_freq` from
    layer `index_skip_topk_offset`."""
    listed = config.get("indexer_types") or config.get("index_topk_pattern")
    if listed is None:
        step = max(fields.number(config, "index_topk_freq", default=1, kind=int), 1)
        first = fields.number(config, "index_skip_topk_offset", default=2, kind=int)
        return tuple(max(layer - first + 1, 0) % step != 0 for layer in range(num_layers))
    kinds = [_KINDS.get(kind, kind) for kind in listed] if isinstance(listed, list | str) else []
    if len(kinds) != num_layers or set(kinds) - {"full", "shared"} or kinds[0] == "shared":
        raise fields.unusable_field(
            "indexer_types",
            why=f"it must be a list of {num_layers} times `full` or `shared` that starts with "
            "`full`",
            fix="correct config.json",
        )
    return tuple(kind == "shared" for kind in kinds)


table = latent.table
