"""Shares facts and rules between Qwen3-Next and Qwen3.5: layers of gated delta net (linear
attention) with gated full attention every few layers, zero-centered norms, a multi-token-prediction
layer. The family files call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from milescli.models import fields, gated_delta, layers
from milescli.models.base import COLUMN, Rule, WeightTable, mixer_layers
from milescli.models.facts import GatedDelta, Layer, ModelFacts
from milescli.models.tensor_rules import hidden
from milescli.models.transforms import join, shapes

if TYPE_CHECKING:
    from torch import Tensor

_MIXERS = {"linear_attention": "gated_delta", "full_attention": "full"}
_MTP_HF = "mtp.layers.{mtp}."
_SHARE, _USUAL_SHARE = "partial_rotary_factor", 0.25
_NESTED = "model.language_model."
VISION = (r"^model\.visual\.",)
"""Patterns of names of the tower that multimodal releases have besides the text model."""


def facts(config: Mapping[str, object], *, family: str) -> ModelFacts:
    """Parse the ModelFacts of a text config whose layers have a plain MLP. Raises CheckpointError
    for what the trainer cannot compute."""
    fields.refuse(config, "hidden_act", unless="silu", why="the trainer only computes gated SiLU")
    fields.refuse(
        config,
        "attention_bias",
        unless=False,
        why="no release has biases, so miles could not verify them",
    )
    fields.refuse(
        config,
        "attn_output_gate",
        unless=True,
        why="transformers always gates the attention of this family",
    )
    fields.refuse(
        config,
        "use_sliding_window",
        unless=False,
        why="transformers does not support a window for this family",
    )
    fields.refuse(
        config,
        "mtp_use_dedicated_embeddings",
        unless=False,
        why="no release has them, so their names are unknown",
    )
    num_layers = fields.number(config, "num_hidden_layers", kind=int)
    num_mtp_layers = fields.number(config, "mtp_num_hidden_layers", default=0, kind=int)
    if num_mtp_layers > 1:
        raise fields.unusable_field(
            "mtp_num_hidden_layers",
            why=f"it is {num_mtp_layers}; releases have one such layer, with one `mtp.fc`",
        )
    return ModelFacts(
        family=family,
        num_layers=num_layers,
        layers=tuple(Layer(mixer=_MIXERS[kind]) for kind in _layer_types(config, num_layers)),
        hidden_size=fields.number(config, "hidden_size", kind=int),
        num_heads=fields.number(config, "num_attention_heads", kind=int),
        num_kv_heads=fields.number(config, "num_key_value_heads", kind=int),
        head_dim=fields.number(config, "head_dim", default=256, kind=int),
        ffn_hidden_size=fields.number(config, "intermediate_size", default=0, kind=int),
        vocab_size=fields.number(config, "vocab_size", kind=int),
        tied_embeddings=fields.number(config, "tie_word_embeddings", default=False, kind=bool),
        rope=fields.rope(_with_share(config)),
        norm_eps=fields.number(config, "rms_norm_eps", default=1e-6, kind=float),
        max_position_embeddings=fields.number(
            config, "max_position_embeddings", default=32_768, kind=int
        ),
        qk_norm=True,
        qkv_bias=False,
        attention_output_gate=True,
        norm_zero_centered=True,
        gated_delta=_gated_delta(config),
        num_mtp_layers=num_mtp_layers,
        dtype=fields.dtype(config),
        eos_token_ids=fields.eos_token_ids(config),
    )


def with_experts(
    model: ModelFacts, config: Mapping[str, object], *, normalize_topk: bool
) -> ModelFacts:
    """Return the model with experts in every layer, including the multi-token-prediction layer.
    Raises CheckpointError."""
    num_experts = fields.number(config, "num_experts", kind=int)
    return replace(
        model,
        layers=tuple(replace(layer, mlp="moe") for layer in model.layers),
        num_experts=num_experts,
        topk=fields.topk(config, "num_experts_per_tok", num_experts=num_experts),
        moe_ffn_hidden_size=fields.number(config, "moe_intermediate_size", kind=int),
        normalize_topk=normalize_topk,
        shared_expert_ffn_hidden_size=fields.number(
            config, "shared_expert_intermediate_size", kind=int
        ),
        shared_expert_gate=True,
    )


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the text model's part of a multimodal release's config, with the fields around it;
    return another config unchanged."""
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, Mapping):
        raise fields.unusable_field("text_config", why=f"it must be an object, not {nested!r}")
    around = {key: config[key] for key in ("dtype", "torch_dtype", "eos_token_id") if key in config}
    # of the two flags, transformers' multimodal class reads the outer one
    tied = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    return {**around, **nested, **tied}


def nested(model: ModelFacts, config: Mapping[str, object]) -> ModelFacts:
    """Return the facts of a text model, marked as part of a multimodal release if the config says
    so."""
    multimodal = config.get("text_config") is not None
    return replace(model, multimodal=True) if multimodal else model


def _layer_types(config: Mapping[str, object], num_layers: int) -> Sequence[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        interval = fields.number(config, "full_attention_interval", default=4, kind=int)
        return [
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(num_layers)
        ]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= _MIXERS.keys():
        raise fields.unusable_field(
            "layer_types",
            why=f"it must be a list of {num_layers}, each of them {' or '.join(_MIXERS)}",
        )
    return kinds


def _with_share(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the config with the share of each head's dims that is rotated; the default is a
    quarter. transformers writes that default next to an object with another value, and uses the
    object's."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_nested = isinstance(nested, Mapping) and nested.get(_SHARE) is not None
    outer = config.get(_SHARE)
    if is_nested:
        return {**config, _SHARE: None} if outer == _USUAL_SHARE else config
    return {**config, _SHARE: _USUAL_SHARE} if outer is None else config


def _gated_delta(config: Mapping[str, object]) -> GatedDelta:
    sizes = GatedDelta(
        num_key_heads=fields.number(config, "linear_num_key_heads", kind=int),
        num_value_heads=fields.number(config, "linear_num_value_heads", kind=int),
        key_head_dim=fields.number(config, "linear_key_head_dim", kind=int),
        value_head_dim=fields.number(config, "linear_value_head_dim", kind=int),
        conv_kernel=fields.number(config, "linear_conv_kernel_dim", default=4, kind=int),
        float32=config.get("mamba_ssm_dtype") == "float32",
    )
    if sizes.num_key_heads < 1 or sizes.num_value_heads % sizes.num_key_heads:
        why = (
            f"{sizes.num_value_heads} value heads cannot be shared out to {sizes.num_key_heads} "
            "key heads"
        )
        raise fields.unusable_field("linear_num_value_heads", why=why)
    return sizes


def _fuse_gated_qkv(tensors: Sequence[Tensor], facts: ModelFacts) -> Tensor:
    """Interleave q [heads * 2 * d, ...] (each head's query, then its gate), k and v [groups * d,
    ...] to [groups, 2 * heads / groups + 2, d, ...], flattened: per key-value head its queries,
    their gates, its key, its value."""
    query, key, value = tensors
    dim, rest = facts.head_dim, key.shape[1:]
    groups = key.shape[0] // dim
    both = query.reshape(groups, -1, 2, dim, *rest)
    parts = [
        both[:, :, 0],
        both[:, :, 1],
        key.reshape(groups, 1, dim, *rest),
        value.reshape(groups, 1, dim, *rest),
    ]
    return join(parts, dim=1).reshape(-1, *rest)


def _split_gated_qkv(tensor: Tensor, facts: ModelFacts) -> list[Tensor]:
    """Split a fused tensor into q, k and v; inverts `_fuse_gated_qkv`."""
    per_group, rest = facts.num_query_heads_per_group, tensor.shape[1:]
    grouped = tensor.reshape(-1, 2 * per_group + 2, facts.head_dim, *rest)
    query, gate, key, value = grouped.split([per_group, per_group, 1, 1], dim=1)
    queries = join([query.unsqueeze(2), gate.unsqueeze(2)], dim=2)
    return [part.reshape(-1, *rest) for part in (queries, key, value)]


_FULL = mixer_layers("full")
_GATED_QKV = replace(
    layers.QKV,
    shapes=shapes(
        lambda f: (2 * f.num_heads * f.head_dim, f.hidden_size),
        lambda f: (f.num_kv_heads * f.head_dim, f.hidden_size),
        lambda f: (f.num_kv_heads * f.head_dim, f.hidden_size),
    ),
    fuse=_fuse_gated_qkv,
    split=_split_gated_qkv,
)
_ATTENTION = tuple(
    replace(rule, where=_FULL)
    for rule in (_GATED_QKV, layers.QUERY_NORM, layers.KEY_NORM, layers.ATTENTION_OUTPUT)
)
_EH_PROJ = layers.mtp_part(
    "mtp.fc.weight", "eh_proj.weight", hidden, lambda f: 2 * f.hidden_size, sharding=COLUMN
)
"""Both Hugging Face and Megatron put the embedding before the hidden state."""
_MTP_NORMS = tuple(
    layers.mtp_part(f"mtp.{hf}.weight", f"{megatron}.weight", hidden)
    for hf, megatron in (
        ("pre_fc_norm_embedding", "enorm"),
        ("pre_fc_norm_hidden", "hnorm"),
        ("norm", "final_layernorm"),
    )
)


def table(facts: ModelFacts, *, in_proj: Rule, experts: tuple[Rule, ...] = ()) -> WeightTable:
    """Map the names and transforms of every weight. `in_proj` is the rule of the gated delta nets'
    input projection, `experts` are the rules of experts, both in the family's form on disk."""
    sparse = (
        (layers.ROUTER, *experts, *layers.shared_experts("mlp.shared_expert."), layers.SHARED_GATE)
        if experts
        else ()
    )
    dense = (layers.MLP_UP, layers.MLP_DOWN)
    attention = (layers.INPUT_NORM, *_ATTENTION, layers.MLP_NORM)
    rules = (
        layers.EMBEDDING,
        *attention,
        in_proj,
        *gated_delta.others(facts),
        *dense,
        *sparse,
        layers.FINAL_NORM,
        *(() if facts.tied_embeddings else (layers.OUTPUT_LAYER,)),
        *_MTP_NORMS,
        _EH_PROJ,
        *layers.in_mtp((*attention, *(sparse or dense)), hf=_MTP_HF),
    )
    return WeightTable(facts=facts, rules=rules)


def either_prefix(facts: ModelFacts, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules with the names of the release, and with the other names as an alternative:
    transformers keeps the multimodal names when it saves the text model of a multimodal release."""
    plain, multimodal = rules, layers.prefixed(rules, _NESTED)
    first, second = (multimodal, plain) if facts.multimodal else (plain, multimodal)
    return tuple(
        rule
        if rule.hf == other.hf
        else replace(rule, alternatives=(*rule.alternatives, _bare(other), *other.alternatives))
        for rule, other in zip(first, second, strict=True)
    )


def _bare(rule: Rule) -> Rule:
    return replace(rule, alternatives=())
