"""Implements `miles models`: what each family supports here, and figures of one model. Reads
config.json and records; starts nothing, loads no torch."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from milescli import models
from milescli.backends.sglang.launch.servable import is_served_on_cpu
from milescli.core.errors import CheckpointError, RecipeError
from milescli.core.files import read_json
from milescli.models import costs
from milescli.models.catalogue import RELEASES, UNPROVEN, evidence
from milescli.recipe.model import Model
from milescli.runtime.inputs.model_facts import facts_of_recipe

CONTEXT = 32_768
"""Length in tokens of the sequence whose cache and FLOPs are shown."""
MIXERS = {
    "full": "attention",
    "sliding": "sliding-window attention",
    "mla": "latent attention",
    "gated_delta": "gated delta net",
    "mamba": "Mamba-2",
    "compressed": "compressed attention",
    "none": "no mixer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRow:
    """Describes one family, and what was tested of it."""

    family: str
    stands_for: str
    convert: bool
    """True if conversion works both ways, bit for bit."""
    train: bool
    """True if Megatron-Core trains it here."""
    logits: float | None
    """Largest relative difference to transformers'."""
    layouts: tuple[str, ...]
    serve_cpu: bool
    """True if its engine was compared with transformers on a CPU; on an accelerator SGLang serves
    what it supports, which miles has not run."""
    evidence: str
    """Date and versions, or that it was not run."""
    remark: str
    """What is missing; empty if nothing is."""


def families() -> list[FamilyRow]:
    """List every family that is known, in the order of the catalogue."""
    records = evidence()
    rows = []
    for family, stands_for in RELEASES.items():
        known = records.get(family)
        rows.append(
            FamilyRow(
                family=family,
                stands_for=stands_for,
                convert=bool(known and known.converted),
                train=bool(known and known.logits is not None),
                logits=known.logits if known else None,
                layouts=known.layouts if known else (),
                serve_cpu=is_served_on_cpu(family),
                evidence=known.when if known else "not run",
                remark=UNPROVEN.get(family, ""),
            )
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNumbers:
    """Holds the figures of one model."""

    family: str
    num_layers: int
    layers: dict[str, int]
    """Kind of layer -> number of such layers."""
    num_parameters: int
    num_active_parameters: int
    num_mtp_parameters: int
    num_vision_parameters: int
    """0 also where a tower is passed through."""
    num_experts: int
    topk: int
    vocab_size: int
    max_position_embeddings: int
    weights_bf16_bytes: int
    cache_bytes_per_token: int
    """bfloat16, layers that keep every position."""
    cache_bytes_at_context: int
    """Cache bytes of one sequence of `context` tokens."""
    context: int
    forward_flops_per_token: float
    """Mean over a sequence of `context` tokens; backward is twice as much."""
    multimodal: bool


def numbers(source: str) -> ModelNumbers:
    """Compute the figures of a Hugging Face folder, a config.json, or a name on the hub (of which
    only config.json is fetched). Raises CheckpointError."""
    facts = _facts(source)
    table = models.table(facts)
    cache, flops = costs.cache_cost(facts), costs.token_flops(table)
    context = min(CONTEXT, facts.max_position_embeddings)
    return ModelNumbers(
        family=facts.family,
        num_layers=facts.num_layers,
        layers=dict(Counter(_kind(layer.mixer, layer.mlp) for layer in facts.layers)),
        num_parameters=table.num_parameters,
        num_active_parameters=table.num_active_parameters,
        num_mtp_parameters=table.num_mtp_parameters,
        num_vision_parameters=table.num_vision_parameters,
        num_experts=facts.num_experts,
        topk=facts.topk,
        vocab_size=facts.vocab_size,
        max_position_embeddings=facts.max_position_embeddings,
        weights_bf16_bytes=costs.weight_bytes(table, dtype="bfloat16"),
        cache_bytes_per_token=cache.bytes_per_token,
        cache_bytes_at_context=cache.bytes_of(context),
        context=context,
        forward_flops_per_token=flops.forward_mean(context),
        multimodal=facts.multimodal,
    )


def _kind(mixer: str, mlp: str) -> str:
    after = {"dense": "MLP", "moe": "experts", "none": ""}[mlp]
    before = "" if mixer == "none" else MIXERS[mixer]
    return " + ".join(part for part in (before, after) if part)


def _facts(source: str) -> models.ModelFacts:
    path = Path(source).expanduser()
    if path.suffix != ".json" or not path.is_file():
        try:
            return facts_of_recipe(Model(path=source))
        except RecipeError as error:  # it speaks of a recipe's key
            error.fixes = ["miles models Qwen/Qwen3-0.6B   # a name on the hub, or another folder"]
            raise
    try:
        return models.parse_facts(read_json(path))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"cannot read `{path}`",
            why=str(error),
            fix="name a config.json of transformers",
        ) from error
