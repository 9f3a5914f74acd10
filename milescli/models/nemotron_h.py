"""Nemotron-H (arXiv 2504.03624), which Nemotron 3 is too: layers of one part each, Mamba-2,
attention without positions, MLP or experts, in the order of a pattern. Facts from its config, and
its weight table with the names of Megatron's MambaModel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from milescli.core.errors import CheckpointError
from milescli.models import fields, layers, mamba2
from milescli.models.base import (
    COLUMN,
    EXPERT_COLUMN,
    EXPERT_ROW,
    REPLICATED,
    ROW,
    Rule,
    Sharding,
    WeightTable,
    Where,
    dense_layers,
    every_layer,
    mixer_layers,
    moe_layers,
)
from milescli.models.facts import Layer, Mamba, ModelFacts
from milescli.models.transforms import alone, same, shapes

_KINDS: dict[str, Layer] = {
    "mamba": Layer(mixer="mamba", mlp="none"),
    "attention": Layer(mixer="full", mlp="none"),
    "mlp": Layer(mixer="none", mlp="dense"),
    "moe": Layer(mixer="none", mlp="moe"),
}
_SYMBOLS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
_PREFIX = "backbone."
"""Of the releases, in place of `model.`"""


def facts(config: Mapping[str, object]) -> ModelFacts:
    """ModelFacts of a `nemotron_h` config. Raises CheckpointError for what the trainer cannot
    compute."""
    _refuse_what_no_release_has(config)
    kinds = _pattern(config, "layers_block_type", "hybrid_override_pattern")
    if not kinds:
        raise CheckpointError(
            "config.json cannot be used: `hybrid_override_pattern`",
            why="neither it nor `layers_block_type` says which layers the model has",
            fix="fetch the model again, or mend config.json",
        )
    hidden_size = fields.number(config, "hidden_size", kind=int)
    num_heads = fields.number(config, "num_attention_heads", kind=int)
    found = ModelFacts(
        family="nemotron_h",
        num_layers=len(kinds),
        layers=tuple(_KINDS[kind] for kind in kinds),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.number(config, "num_key_value_heads", default=num_heads, kind=int),
        head_dim=fields.number(config, "head_dim", default=128, kind=int),
        ffn_hidden_size=fields.number(config, "intermediate_size", kind=int)
        if "mlp" in kinds
        else 0,
        vocab_size=fields.number(config, "vocab_size", kind=int),
        tied_embeddings=False,
        rope=None,
        norm_eps=fields.number(config, "layer_norm_epsilon", default=1e-5, kind=float),
        max_position_embeddings=fields.number(
            config, "max_position_embeddings", default=4096, kind=int
        ),
        qk_norm=False,
        qkv_bias=False,
        mamba=_mamba(config),
        activation="relu2",
        gated_mlp=False,
        dtype=fields.dtype(config),
        eos_token_ids=fields.eos_token_ids(config),
    )
    found = replace(found, **_mtp(config))
    return replace(found, **_experts(config)) if "moe" in kinds else found


def _refuse_what_no_release_has(config: Mapping[str, object]) -> None:
    unlike = "no release has it, so nothing could be compared with"
    for name, usual in (
        ("mamba_hidden_act", "silu"),
        ("mlp_hidden_act", "relu2"),
        ("use_bias", False),
        ("mamba_proj_bias", False),
        ("mlp_bias", False),
        ("attention_bias", False),
        ("residual_in_fp32", False),
        ("sliding_window", None),
        ("n_shared_experts", 1),
    ):
        fields.refuse(config, name, unless=usual, why=unlike)
    _require_free_time_steps(config)
    fields.refuse(
        config,
        "tie_word_embeddings",
        unless=False,
        why="transformers gives this family an output layer of its own in any case, SGLang does "
        "not, and no release has it",
    )


def _require_free_time_steps(config: Mapping[str, object]) -> None:
    limit = config.get("time_step_limit", config.get("mamba_dt_limit"))
    # strict JSON has no word for infinity: transformers writes an object, the releases the bare
    # word
    plain = (
        [float(each["__float__"]) if isinstance(each, dict) else each for each in limit]
        if isinstance(limit, list)
        else None
    )
    if limit is not None and plain != [0.0, float("inf")]:
        raise CheckpointError(
            f"a model with `time_step_limit: {limit}` is not supported",
            why="the trainer leaves time steps as they are, and no release limits them",
            fix="use a model with `time_step_limit: [0.0, Infinity]`",
        )


def _pattern(config: Mapping[str, object], listed: str, symbols: str) -> tuple[str, ...]:
    """Kinds of layers, from a list of words (transformers 5) or a string of symbols (the releases);
    empty where there is neither."""
    found = config.get(listed)
    kinds = (
        found
        if isinstance(found, list)
        else [_SYMBOLS.get(symbol, symbol) for symbol in str(config.get(symbols) or "")]
    )
    for kind in kinds:
        if kind not in _KINDS:
            raise CheckpointError(
                f"config.json cannot be used: `{symbols}`",
                why=f"`{kind}` is no kind of layer; there are "
                f"{', '.join(f'{word} ({sign})' for sign, word in _SYMBOLS.items())}",
                fix="fetch the model again, or mend config.json",
            )
    return tuple(cast("list[str]", kinds))


def _mamba(config: Mapping[str, object]) -> Mamba:
    return Mamba(
        num_heads=fields.number(config, "mamba_num_heads", kind=int),
        head_dim=fields.number(config, "mamba_head_dim", kind=int),
        num_groups=fields.number(config, "n_groups", "mamba_n_groups", default=8, kind=int),
        state_size=fields.number(config, "ssm_state_size", default=128, kind=int),
        conv_kernel=fields.number(config, "conv_kernel", "mamba_d_conv", default=4, kind=int),
        conv_bias=fields.number(
            config, "use_conv_bias", "mamba_conv_bias", default=True, kind=bool
        ),
    )


def _experts(config: Mapping[str, object]) -> dict[str, object]:
    num_experts = fields.number(config, "n_routed_experts", kind=int)
    return {
        "num_experts": num_experts,
        "topk": fields.topk(config, "num_experts_per_tok", num_experts=num_experts),
        "moe_ffn_hidden_size": fields.number(config, "moe_intermediate_size", kind=int),
        "normalize_topk": fields.number(config, "norm_topk_prob", default=True, kind=bool),
        "shared_expert_ffn_hidden_size": fields.number(
            config, "moe_shared_expert_intermediate_size", kind=int
        ),
        "router_score": "sigmoid",
        "router_bias": True,
        "router_groups": fields.number(config, "n_group", default=1, kind=int),
        "router_topk_groups": fields.number(config, "topk_group", default=1, kind=int),
        "router_scaling": fields.number(config, "routed_scaling_factor", default=1.0, kind=float),
        "moe_latent_size": fields.number(config, "moe_latent_size", default=0, kind=int),
    }


def _mtp(config: Mapping[str, object]) -> dict[str, object]:
    num_layers = fields.number(config, "num_nextn_predict_layers", default=0, kind=int)
    kinds = _pattern(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern") or (
        "attention",
        "moe",
    )
    if num_layers > 1 and len(kinds) > 1:
        raise CheckpointError(
            f"a model with `num_nextn_predict_layers: {num_layers}` is not supported",
            why="Nemotron-H releases have one multi-token-prediction layer, and how more would be "
            "named is not known",
            fix="use a model with `num_nextn_predict_layers: 1`",
        )
    return {
        "num_mtp_layers": num_layers,
        "mtp_layers": tuple(_KINDS[kind] for kind in kinds) if num_layers else (),
    }


def _rule(
    hf: str,
    megatron: str,
    *dims: Callable[[ModelFacts], int],
    sharding: Sharding,
    where: Where,
    stacked: Rule | None = None,
) -> Rule:
    """One tensor that stays as it is, of the lengths `dims`. `stacked`: as disks hold it for all
    experts in one."""
    return Rule(
        hf=(_HF + hf,),
        megatron=_MEGATRON + megatron,
        shapes=shapes(lambda facts: tuple(dim(facts) for dim in dims)),
        sharding=sharding,
        fuse=same,
        split=alone,
        where=where,
        alternatives=() if stacked is None else (stacked,),
    )


def _hidden(facts: ModelFacts) -> int:
    return facts.hidden_size


def _ffn(facts: ModelFacts) -> int:
    return facts.ffn_hidden_size


def _expert_ffn(facts: ModelFacts) -> int:
    return facts.moe_ffn_hidden_size


def _shared_ffn(facts: ModelFacts) -> int:
    return facts.shared_expert_ffn_hidden_size


def _latent(facts: ModelFacts) -> int:
    return facts.moe_latent_size


def _expert_width(facts: ModelFacts) -> int:
    """What goes into an expert, and comes out."""
    return facts.moe_latent_size or facts.hidden_size


def _has_latent(facts: ModelFacts, layer: int) -> bool:
    return bool(facts.moe_latent_size) and moe_layers(facts, layer)


def _expert(hf: str, megatron: str, *dims: Callable[[ModelFacts], int], sharding: Sharding) -> Rule:
    """Of each expert; transformers holds all in one in memory."""
    name = "mlp.experts.local_experts.{expert}." + megatron
    stacked = replace(
        _rule(f"mixer.experts.{hf}", name, *dims, sharding=sharding, where=moe_layers), stacked=True
    )
    return _rule(
        "mixer.experts.{expert}." + f"{hf}.weight",
        name,
        *dims,
        sharding=sharding,
        where=moe_layers,
        stacked=stacked,
    )


_ATTENTION_LAYERS = mixer_layers("full")
_ATTENTION = (
    _rule(
        "norm.weight",
        "input_layernorm.weight",
        _hidden,
        sharding=REPLICATED,
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
    _rule(
        "norm.weight", "pre_mlp_layernorm.weight", _hidden, sharding=REPLICATED, where=dense_layers
    ),
    _rule(
        "mixer.up_proj.weight",
        "mlp.linear_fc1.weight",
        _ffn,
        _hidden,
        sharding=COLUMN,
        where=dense_layers,
    ),
    _rule(
        "mixer.down_proj.weight",
        "mlp.linear_fc2.weight",
        _hidden,
        _ffn,
        sharding=ROW,
        where=dense_layers,
    ),
)
_MOE = (
    _rule(
        "norm.weight", "pre_mlp_layernorm.weight", _hidden, sharding=REPLICATED, where=moe_layers
    ),
    replace(layers.ROUTER, hf=(_HF + "mixer.gate.weight",)),
    replace(layers.ROUTER_BIAS, hf=(_HF + "mixer.gate.e_score_correction_bias",)),
    _rule(
        "mixer.fc1_latent_proj.weight",
        "mlp.fc1_latent_proj.weight",
        _latent,
        _hidden,
        sharding=REPLICATED,
        where=_has_latent,
    ),
    _expert("up_proj", "linear_fc1.weight", _expert_ffn, _expert_width, sharding=EXPERT_COLUMN),
    _expert("down_proj", "linear_fc2.weight", _expert_width, _expert_ffn, sharding=EXPERT_ROW),
    _rule(
        "mixer.fc2_latent_proj.weight",
        "mlp.fc2_latent_proj.weight",
        _hidden,
        _latent,
        sharding=REPLICATED,
        where=_has_latent,
    ),
    _rule(
        "mixer.shared_experts.up_proj.weight",
        "mlp.shared_experts.linear_fc1.weight",
        _shared_ffn,
        _hidden,
        sharding=COLUMN,
        where=moe_layers,
    ),
    _rule(
        "mixer.shared_experts.down_proj.weight",
        "mlp.shared_experts.linear_fc2.weight",
        _hidden,
        _shared_ffn,
        sharding=ROW,
        where=moe_layers,
    ),
)
_OF_KIND = {"mamba": mamba2.RULES, "attention": _ATTENTION, "mlp": _MLP, "moe": _MOE}
_SPELT_BY_TRANSFORMERS = replace(layers.EMBEDDING, hf=("backbone.embedding.weight",))
"""transformers 5.12.1 reads `backbone.embeddings.weight` and writes this."""


def table(facts: ModelFacts) -> WeightTable:
    """Names and transforms of every weight."""
    embedding = replace(
        layers.EMBEDDING, hf=("model.embeddings.weight",), alternatives=(_SPELT_BY_TRANSFORMERS,)
    )
    final_norm = replace(
        layers.FINAL_NORM, hf=("model.norm_f.weight",), megatron="decoder.final_norm.weight"
    )
    decoder = tuple(rule for rules in _OF_KIND.values() for rule in rules)
    within = tuple(_either_prefix(rule) for rule in (embedding, *decoder, final_norm))
    return WeightTable(facts=facts, rules=(*within, layers.OUTPUT_LAYER, *_mtp_rules(facts)))


def _either_prefix(rule: Rule) -> Rule:
    """The rule under the releases' names, with those that begin with `model.` as another form."""
    (released,) = layers.prefixed((rule,), _PREFIX)
    return replace(released, alternatives=(*released.alternatives, rule, *rule.alternatives))


def _mtp_rules(facts: ModelFacts) -> tuple[Rule, ...]:
    """Of a multi-token-prediction layer, under the names of the releases, which count the layers
    within it. Megatron-Core 0.16.1 gives MambaModel none; the names are those of later versions."""
    last = len(facts.mtp_layers) - 1
    found: list[Rule] = []
    for number, layer in enumerate(facts.mtp_layers):
        (rules,) = (_OF_KIND[kind] for kind, known in _KINDS.items() if known == layer)
        hf, megatron = (
            f"mtp.layers.{number if last else '{mtp}'}.",
            f"{layers.MTP}mtp_model_layer.layers.{number}.",
        )
        if number == 0:
            found += [_frame(hf, name, _hidden) for name in ("enorm", "hnorm")]
            found.append(
                _frame(hf, "eh_proj", _hidden, lambda f: 2 * f.hidden_size, sharding=COLUMN)
            )
        found += [
            replace(
                rule,
                hf=tuple(hf + name.removeprefix(_HF) for name in rule.hf),
                megatron=megatron + rule.megatron.removeprefix(_MEGATRON),
                block="mtp",
                alternatives=(),
            )
            for rule in rules
            if facts.moe_latent_size or rule.where is not _has_latent
        ]
        if number == last:
            found.append(_frame(hf, "final_layernorm", _hidden))
    return tuple(found)


def _frame(
    hf: str, name: str, *dims: Callable[[ModelFacts], int], sharding: Sharding = REPLICATED
) -> Rule:
    rule = _rule("", "", *dims, sharding=sharding, where=every_layer)
    return replace(
        rule, hf=(f"{hf}{name}.weight",), megatron=f"{layers.MTP}{name}.weight", block="mtp"
    )
