"""Converts a model of any family to one that gives a score instead of a next token, as reward
models and critics do: its output layer is one row. On disk it is transformers' model for sequence
classification with one label. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from milescli.core.errors import CheckpointError
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts
from milescli.models.tensor_rules import hidden, tensor_rule

SUFFIX = "ForSequenceClassification"
HEAD = "score.weight"
OUTPUT = "output_layer.weight"
"""Name of the output layer in Megatron's model, for either head."""

SCORE = tensor_rule(HEAD, OUTPUT, lambda f: 1, hidden, block="outside")


def scores(config: Mapping[str, object]) -> bool:
    """Return True if a config.json describes a model that gives scores. Raises CheckpointError if
    it has several labels."""
    if "id2label" not in config and "num_labels" not in config:
        return False
    names = config.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(SUFFIX) for name in names):
        return False
    labels = config.get("id2label")
    count = config.get("num_labels", len(labels) if isinstance(labels, Mapping) else 2)
    if count != 1:
        raise CheckpointError(
            f"a classifier with {count} labels is not a reward model",
            why="`num_labels` in its config.json must be 1, the score",
            fix="set `model.path` to a reward model, or to the model to turn into one",
        )
    return True


def with_score_head(facts: ModelFacts) -> ModelFacts:
    """Return the same model with a score head in place of its vocabulary."""
    return replace(facts, scores=True, tied_embeddings=False, logit_softcap=None, num_mtp_layers=0)


def with_score_rule(table: WeightTable) -> WeightTable:
    """Return the table of a family for a model whose facts have `scores`. Its folder may still hold
    the output layer and the MTP layers of the model that it was made from."""
    left = [rule for rule in table.rules if rule.megatron == OUTPUT or rule.block == "mtp"]
    names = {
        _pattern(name, first=table.facts.num_layers)
        for rule in left
        for form in (rule, *rule.alternatives)
        for name in form.hf
    }
    return replace(
        table,
        rules=(*(rule for rule in table.rules if rule not in left), SCORE),
        ignored=(*table.ignored, r"(^|\.)lm_head\.weight$", f"^({'|'.join(sorted(names))})$"),
    )


def _pattern(name: str, *, first: int) -> str:
    """Return a regular expression for a name with {layer}, {mtp} and {expert}. `first` is the
    number of the first layer after the decoder's, where some families keep MTP layers."""
    layer = "|".join(str(first + number) for number in range(4))
    pattern = re.escape(name).replace(r"\{layer\}", f"({layer})")
    return re.sub(r"\\{(mtp|expert)\\}", r"\\d+", pattern)


def score_config(config: Mapping[str, object], *, pad_token_id: int | None) -> dict[str, object]:
    """Return the config.json of a scoring model, made from that of a generating model.
    `pad_token_id` must not be the end-of-text token, since transformers reads the score before the
    padding."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "Model"
    stem = name.removesuffix(SUFFIX)
    for end in ("ForCausalLM", "ForConditionalGeneration"):
        stem = stem.removesuffix(end)
    return {
        **config,
        "architectures": [stem + SUFFIX],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": pad_token_id,
    }
