"""Family MiMo-7B: a Qwen2 decoder with multi-token-prediction layers. transformers lacks it: the
names of those layers are as SGLang reads them (models/mimo_mtp.py), and the decoder is compared
with Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.models import fields, layers
from milescli.models.base import COLUMN, WeightTable
from milescli.models.facts import ModelFacts
from milescli.models.families import llama, qwen2
from milescli.models.tensor_rules import hidden
from milescli.models.transforms import swap_columns, unswap_columns

_MTP = "model.mtp_layers.{mtp}."


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `mimo` config. Raises CheckpointError for what the trainer cannot
    compute."""
    fields.refuse(
        config,
        "attention_bias",
        unless=True,
        why="releases have biases of queries, keys and values",
    )
    num_mtp_layers = fields.number(config, "num_nextn_predict_layers", default=0, kind=int)
    return replace(qwen2.facts(config, family="mimo"), num_mtp_layers=num_mtp_layers)


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    decoder = llama.table(facts)
    # the hidden state stands before the embedding here, and behind it in Megatron
    projection = replace(
        layers.mtp_part(
            _MTP + "input_proj.weight",
            "eh_proj.weight",
            hidden,
            lambda f: 2 * f.hidden_size,
            sharding=COLUMN,
        ),
        fuse=swap_columns,
        split=unswap_columns,
    )
    mtp = (
        layers.mtp_part(_MTP + "token_layernorm.weight", "enorm.weight", hidden),
        layers.mtp_part(_MTP + "hidden_layernorm.weight", "hnorm.weight", hidden),
        projection,
        *layers.in_mtp((*llama.attention(facts), *llama.mlp(facts)), hf=_MTP),
        layers.mtp_part(_MTP + "final_layernorm.weight", "final_layernorm.weight", hidden),
    )
    return replace(decoder, rules=(*decoder.rules, *mtp))
