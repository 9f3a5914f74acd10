"""Makes Nemotron-H's weight table, with the names of Megatron's MambaModel: each layer has one
part. The family file calls it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from milescli.models import layers, mamba2
from milescli.models.base import (
    COLUMN,
    EXPERT_COLUMN,
    EXPERT_ROW,
    ROW,
    Rule,
    Sharding,
    WeightTable,
    Where,
    dense_layers,
    mixer_layers,
    moe_layers,
)
from milescli.models.facts import Layer, ModelFacts
from milescli.models.tensor_rules import Size, expert_ffn, ffn, hidden, shared_ffn, tensor_rule

KINDS: dict[str, Layer] = {
    "mamba": Layer(mixer="mamba", mlp="none"),
    "attention": Layer(mixer="full", mlp="none"),
    "mlp": Layer(mixer="none", mlp="dense"),
    "moe": Layer(mixer="none", mlp="moe"),
}
"""Kinds of layers, by transformers' names."""
_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
_PREFIX = "backbone."
"""Prefix of the releases' names, in place of `model.`"""


def _rule(hf: str, megatron: str, *dims: Size, where: Where, **others: Any) -> Rule:
    return tensor_rule(_HF + hf, _MEGATRON + megatron, *dims, where=where, **others)


def _latent(facts: ModelFacts) -> int:
    return facts.moe_latent_size


def _expert_width(facts: ModelFacts) -> int:
    """Return the width of an expert's input and output."""
    return facts.moe_latent_size or facts.hidden_size


def _has_latent(facts: ModelFacts, layer: int) -> bool:
    return bool(facts.moe_latent_size) and moe_layers(facts, layer)


def _expert(hf: str, megatron: str, *dims: Size, sharding: Sharding) -> Rule:
    """Return the rule of a tensor of each expert; transformers holds all experts in one tensor in
    memory."""
    name = "mlp.experts.local_experts.{expert}." + megatron
    single = _rule(
        "mixer.experts.{expert}." + f"{hf}.weight", name, *dims, where=moe_layers, sharding=sharding
    )
    stacked = replace(single, hf=(_HF + f"mixer.experts.{hf}",), stacked=True)
    return replace(single, alternatives=(stacked,))


_ATTENTION_LAYERS = mixer_layers("full")
_ATTENTION = (
    _rule(
        "norm.weight",
        "input_layernorm.weight",
        hidden,
        where=_ATTENTION_LAYERS,
    ),
    replace(
        layers.QKV,
        hf=tuple(_HF + f"mixer.{name}_proj.weight" for name in "qkv"),
        where=_ATTENTION_LAYERS,
    ),
    replace(layers.ATTENTION_OUTPUT, hf=(_HF + "mixer.o_proj.weight",), where=_ATTENTION_LAYERS),
)
_MLP = (
    _rule("norm.weight", "pre_mlp_layernorm.weight", hidden, where=dense_layers),
    _rule(
        "mixer.up_proj.weight",
        "mlp.linear_fc1.weight",
        ffn,
        hidden,
        sharding=COLUMN,
        where=dense_layers,
    ),
    _rule(
        "mixer.down_proj.weight",
        "mlp.linear_fc2.weight",
        hidden,
        ffn,
        sharding=ROW,
        where=dense_layers,
    ),
)
_MOE = (
    _rule("norm.weight", "pre_mlp_layernorm.weight", hidden, where=moe_layers),
    replace(layers.ROUTER, hf=(_HF + "mixer.gate.weight",)),
    replace(layers.ROUTER_BIAS, hf=(_HF + "mixer.gate.e_score_correction_bias",)),
    _rule(
        "mixer.fc1_latent_proj.weight",
        "mlp.fc1_latent_proj.weight",
        _latent,
        hidden,
        where=_has_latent,
    ),
    _expert("up_proj", "linear_fc1.weight", expert_ffn, _expert_width, sharding=EXPERT_COLUMN),
    _expert("down_proj", "linear_fc2.weight", _expert_width, expert_ffn, sharding=EXPERT_ROW),
    _rule(
        "mixer.fc2_latent_proj.weight",
        "mlp.fc2_latent_proj.weight",
        hidden,
        _latent,
        where=_has_latent,
    ),
    _rule(
        "mixer.shared_experts.up_proj.weight",
        "mlp.shared_experts.linear_fc1.weight",
        shared_ffn,
        hidden,
        sharding=COLUMN,
        where=moe_layers,
    ),
    _rule(
        "mixer.shared_experts.down_proj.weight",
        "mlp.shared_experts.linear_fc2.weight",
        hidden,
        shared_ffn,
        sharding=ROW,
        where=moe_layers,
    ),
)
_OF_KIND = {"mamba": mamba2.RULES, "attention": _ATTENTION, "mlp": _MLP, "moe": _MOE}
_TRANSFORMERS_EMBEDDING = replace(layers.EMBEDDING, hf=("backbone.embedding.weight",))
"""Rule with the name `backbone.embedding.weight`, which transformers 5.12.1 writes; it reads
`backbone.embeddings.weight`."""


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    embedding = replace(
        layers.EMBEDDING, hf=("model.embeddings.weight",), alternatives=(_TRANSFORMERS_EMBEDDING,)
    )
    final_norm = replace(
        layers.FINAL_NORM, hf=("model.norm_f.weight",), megatron="decoder.final_norm.weight"
    )
    decoder = tuple(rule for rules in _OF_KIND.values() for rule in rules)
    within = tuple(_either_prefix(rule) for rule in (embedding, *decoder, final_norm))
    return WeightTable(facts=facts, rules=(*within, layers.OUTPUT_LAYER, *_mtp_rules(facts)))


def _either_prefix(rule: Rule) -> Rule:
    """Return the rule with the releases' names, and as an alternative with names that begin with
    `model.`."""
    (released,) = layers.prefixed((rule,), _PREFIX)
    return replace(released, alternatives=(*released.alternatives, rule, *rule.alternatives))


def _mtp_rules(facts: ModelFacts) -> tuple[Rule, ...]:
    """Return the rules of a multi-token-prediction layer, with the names of the releases, which
    number the layers within it. Megatron-Core 0.16.1 gives MambaModel no such layer; the names are
    those of later versions."""
    last = len(facts.mtp_layers) - 1
    rules: list[Rule] = []
    for number, layer in enumerate(facts.mtp_layers):
        (within,) = (_OF_KIND[kind] for kind, known in KINDS.items() if known == layer)
        hf, megatron = (
            f"mtp.layers.{number if last else '{mtp}'}.",
            f"{layers.MTP}mtp_model_layer.layers.{number}.",
        )
        if number == 0:
            rules += [_frame(hf, name, hidden) for name in ("enorm", "hnorm")]
            rules.append(
                _frame(hf, "eh_proj", hidden, lambda f: 2 * f.hidden_size, sharding=COLUMN)
            )
        rules += [
            replace(
                rule,
                hf=tuple(hf + name.removeprefix(_HF) for name in rule.hf),
                megatron=megatron + rule.megatron.removeprefix(_MEGATRON),
                block="mtp",
                alternatives=(),
            )
            for rule in within
            if facts.moe_latent_size or rule.where is not _has_latent
        ]
        if number == last:
            rules.append(_frame(hf, "final_layernorm", hidden))
    return tuple(rules)


def _frame(hf: str, name: str, *dims: Size, **others: Any) -> Rule:
    return layers.mtp_part(f"{hf}{name}.weight", f"{name}.weight", *dims, **others)
