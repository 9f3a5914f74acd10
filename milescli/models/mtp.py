"""Selects the multi-token-prediction layers to train. Called before a device is used, and by the
trainer's ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from milescli.core.errors import CheckpointError
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts

TRAINABLE = (
    "deepseek_v3",
    "deepseek_v4",
    "glm4_moe",
    "glm4_moe_lite",
    "mimo",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
)
"""Families whose MTP layer was compared with an independent implementation."""
_OFF = "--set train.mtp.loss_weight=null"


def with_mtp(facts: ModelFacts) -> ModelFacts:
    """Return the facts of a model whose MTP layer is trained. Raises CheckpointError if it has
    none, or one that the trainer does not compute."""
    why = None
    if not facts.num_mtp_layers:
        why = f"its config.json has no `{field_of(facts)}`"
    elif facts.family not in TRAINABLE:
        why = (
            f"it is of type `{facts.family}`, and only the layers of {', '.join(TRAINABLE)} were "
            "compared with another implementation"
        )
    elif facts.num_mtp_layers > 1:
        why = f"it has {facts.num_mtp_layers} of them, and releases of its family have one"
    elif facts.tied_embeddings:
        why = "its output layer is its embedding, of which the last stage would need a third copy"
    if why is not None:
        raise CheckpointError(
            f"the MTP layer of this `{facts.family}` model cannot be trained",
            why=why,
            fix=[_OFF, "--set model.path=FOLDER   # another model"],
        )
    return replace(facts, trains_mtp=True)


def with_mtp_last(facts: ModelFacts) -> ModelFacts:
    """Return the facts with the decoder layer of the MTP layer appended."""
    layers = (*facts.layers, facts.mtp_layer)
    return replace(facts, layers=layers, num_layers=facts.num_layers + 1)


def field_of(facts: ModelFacts) -> str:
    """Return the field of config.json that holds the number of MTP layers."""
    return "mtp_num_hidden_layers" if facts.gated_delta else "num_nextn_predict_layers"


def with_shared_ends(table: WeightTable) -> WeightTable:
    """Return the table without the copies of embedding and output layer that some releases store in
    their MTP layers: a trained MTP layer shares them with the model."""
    rules = tuple(rule for rule in table.rules if not (rule.block == "mtp" and rule.optional))
    return replace(table, rules=rules)


def require_mtp_weights(table: WeightTable, names: Collection[str], *, folder: str) -> None:
    """Raise CheckpointError if a folder with tensors `names` lacks weights of the MTP layer.
    `table` is that of `with_mtp`, in the folder's form."""
    there = set(names)
    mine = {name for entry in table.entries if entry.mtp is not None for name in entry.hf}
    if mine and mine <= there:
        return
    missing = sorted(mine - there)
    raise CheckpointError(
        f"`{folder}` has no MTP layer that could be trained",
        why=f"its family has such a layer, but `{missing[0]}` is missing"
        if missing
        else "its family has such a layer, but all of its tensors are missing (transformers does "
        "not save them)",
        fix=[_OFF, "--set model.path=FOLDER   # the original release"],
    )
