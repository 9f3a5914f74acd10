"""Family Qwen3-Next: gated delta nets (linear attention), with gated full attention every few
layers, and experts with a gated shared one. Facts from its config, and its weight table. What it
shares with Qwen3.5 is in `hybrid`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.models import fields, gated_delta, hybrid, layers
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `qwen3_next` config. Raises CheckpointError for what the trainer
    cannot compute."""
    # the release has a multi-token-prediction layer that its config does not tell of; `as_on_disk`
    # leaves it out where it is not there
    plain = hybrid.facts({"mtp_num_hidden_layers": 1, **config}, family="qwen3_next")
    normalized = fields.number(config, "norm_topk_prob", default=True, kind=bool)
    sparse = hybrid.with_experts(plain, config, normalize_topk=normalized)
    step = fields.number(config, "decoder_sparse_step", default=1, kind=int)
    dense = config.get("mlp_only_layers") or []
    assert isinstance(dense, list), dense
    mixed = tuple(
        layer if (number + 1) % step or number in dense else sparse.layers[number]
        for number, layer in enumerate(plain.layers)
    )
    has_dense = any(layer.mlp == "dense" for layer in mixed)
    return replace(sparse, layers=mixed, ffn_hidden_size=plain.ffn_hidden_size if has_dense else 0)


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    return hybrid.table(
        facts, in_proj=gated_delta.GROUPED_IN_PROJ, experts=(layers.EXPERT_UP, layers.EXPERT_DOWN)
    )
