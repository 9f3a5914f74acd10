"""Family Gemma 4 (26B-A4B, 31B): Gemma 3's layers, but layers that attend to all positions have
other heads, values are normalised, and experts are parallel to the MLP. The text model alone, or
within a multimodal release, whose towers are passed through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from milescli.models import fields, hybrid, layers
from milescli.models.base import COLUMN, EXPERT_COLUMN, EXPERT_ROW, Rule, WeightTable
from milescli.models.facts import Layer, Mixer, ModelFacts, Rope
from milescli.models.families import gemma3, llama
from milescli.models.tensor_rules import expert_ffn, hidden, num_experts, tensor_rule
from milescli.models.transforms import (
    concatenate,
    halve,
    join,
    join_parts,
    shapes,
    split_halves,
)

if TYPE_CHECKING:
    from torch import Tensor

_NESTED = "model.language_model."
_TOWERS = (r"^model\.(vision_tower|embed_vision|audio_tower|embed_audio)\.",)
_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
_SIZES = {"num_hidden_layers": 30, "vocab_size": 262_144, "sliding_window": 512}
"""transformers' defaults for fields that a config omits, if they differ from Gemma 3's."""
_PERIOD: tuple[Mixer, ...] = ("sliding", "sliding", "sliding", "sliding", "sliding", "full")


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `gemma4` or `gemma4_text` config. Raises CheckpointError for what
    the trainer cannot compute."""
    text = hybrid.text_config(config)
    multimodal = text is not config
    why = "the trainer computes the larger models of this family, which have none"
    # transformers takes 256 where the config says nothing
    fields.refuse(
        {"hidden_size_per_layer_input": 256, **text},
        "hidden_size_per_layer_input",
        unless=0,
        why=why,
    )
    fields.refuse(text, "num_kv_shared_layers", unless=0, why=why)
    # images alone are looked at from both sides
    if text.get("use_bidirectional_attention") != "vision":
        fields.refuse(
            text,
            "use_bidirectional_attention",
            unless=None,
            why="the trainer's attention is causal",
        )
    plain = gemma3.text_facts({**_SIZES, **text}, family="gemma4")
    model = replace(
        plain,
        layers=_layers(text, plain),
        rope=_rope(text, "full_attention", Rope(theta=1e6, share=0.25, proportional=True)),
        rope_sliding=_rope(text, "sliding_attention", Rope(theta=1e4)),
        attention_scale=1.0,
        value_norm=True,
        layer_scalar=True,
        eos_token_ids=fields.eos_token_ids(config) or plain.eos_token_ids,
        multimodal=multimodal,
    )
    return (
        _with_experts(model, text)
        if fields.number(text, "enable_moe_block", default=False, kind=bool)
        else model
    )


def _layers(config: Mapping[str, object], plain: ModelFacts) -> tuple[Layer, ...]:
    mixers = fields.mixers(config, num_layers=plain.num_layers, period=_PERIOD)
    head_dim = fields.number(config, "global_head_dim", default=512, kind=int) or plain.head_dim
    shared = fields.number(config, "attention_k_eq_v", default=False, kind=bool)
    num_kv_heads = plain.num_kv_heads
    if shared:
        num_kv_heads = fields.number(
            config, "num_global_key_value_heads", default=num_kv_heads, kind=int
        )
    if num_kv_heads < 1 or plain.num_heads % num_kv_heads:
        raise fields.unusable_field(
            "num_global_key_value_heads",
            why=f"{plain.num_heads} query heads cannot share {num_kv_heads} key-value heads "
            "equally",
        )
    full = Layer(mixer="full", head_dim=head_dim, num_kv_heads=num_kv_heads, key_is_value=shared)
    decoder = [Layer(mixer="sliding") if mixer == "sliding" else full for mixer in mixers]
    # as transformers does, whatever the config says
    return (*decoder[:-1], full)


def _rope(config: Mapping[str, object], layer_type: str, usual: Rope) -> Rope:
    if config.get("rope_parameters") is None:
        return usual
    return fields.rope(config, layer_type=layer_type)


def _with_experts(model: ModelFacts, config: Mapping[str, object]) -> ModelFacts:
    num_experts = fields.number(config, "num_experts", kind=int)
    return replace(
        model,
        layers=tuple(replace(layer, mlp="moe") for layer in model.layers),
        ffn_hidden_size=0,
        shared_expert_ffn_hidden_size=model.ffn_hidden_size,
        moe_ffn_hidden_size=fields.number(config, "moe_intermediate_size", kind=int),
        num_experts=num_experts,
        topk=fields.topk(config, "top_k_experts", num_experts=num_experts),
        normalize_topk=True,
        experts_beside_mlp=True,
    )


def _fuse_qk(tensors: Sequence[Tensor], facts: ModelFacts) -> Tensor:
    """Interleave q [heads * d, hidden] and k [groups * d, hidden] to [groups, heads / groups + 1,
    d, hidden], flattened."""
    query, key = tensors
    groups = key.shape[0] // facts.head_dim
    parts = [part.unflatten(0, (groups, -1, facts.head_dim)) for part in (query, key)]
    return join(parts, dim=1).flatten(0, 2)


def _split_qk(tensor: Tensor, facts: ModelFacts) -> list[Tensor]:
    """Split a fused tensor into q and k; inverts `_fuse_qk`."""
    per_group = facts.num_query_heads_per_group
    grouped = tensor.unflatten(0, (-1, per_group + 1, facts.head_dim))
    return [part.flatten(0, 2) for part in grouped.split([per_group, 1], dim=1)]


_QKV = replace(layers.QKV, where=lambda f, layer: not f.layers[layer].key_is_value)
_QK = Rule(
    hf=layers.QKV.hf[:2],
    megatron=layers.QKV.megatron,
    shapes=shapes(
        lambda f: (f.num_heads * f.head_dim, f.hidden_size),
        lambda f: (f.num_kv_heads * f.head_dim, f.hidden_size),
    ),
    sharding=COLUMN,
    fuse=_fuse_qk,
    split=_split_qk,
    where=lambda f, layer: f.layers[layer].key_is_value,
)
_LAYER_SCALAR = tensor_rule(
    _HF + "layer_scalar", _MEGATRON + "layer_scalar", lambda f: 1, buffer=True
)
_EXPERT_UP = Rule(
    hf=(_HF + "experts.gate_up_proj",),
    megatron=_MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    shapes=shapes(lambda f: (2 * f.moe_ffn_hidden_size, f.hidden_size)),
    sharding=EXPERT_COLUMN,
    fuse=concatenate,
    split=halve,
    stacked=True,
    unpack=split_halves,
    pack=join_parts,
)
_EXPERT_DOWN = tensor_rule(
    _HF + "experts.down_proj",
    _MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
    hidden,
    expert_ffn,
    sharding=EXPERT_ROW,
    stacked=True,
)
_ROUTER = tensor_rule(
    _HF + "router.proj.weight", _MEGATRON + "mlp.router.weight", num_experts, hidden
)
_EXPERTS = (
    layers.norm("pre_feedforward_layernorm.weight", "mlp.pre_shared_layernorm.weight"),
    *layers.shared_experts("mlp."),
    layers.norm("post_feedforward_layernorm_1.weight", "mlp.post_shared_layernorm.weight"),
    tensor_rule(_HF + "router.scale", _MEGATRON + "mlp.router.scale", hidden),
    _ROUTER,
    tensor_rule(
        _HF + "router.per_expert_scale", _MEGATRON + "mlp.router.per_expert_scale", num_experts
    ),
    layers.norm("pre_feedforward_layernorm_2.weight", "mlp.pre_experts_layernorm.weight"),
    _EXPERT_UP,
    _EXPERT_DOWN,
    layers.norm("post_feedforward_layernorm_2.weight", "mlp.post_experts_layernorm.weight"),
)


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    mlp = (
        _EXPERTS if facts.experts_beside_mlp else (gemma3.MLP_NORM, layers.MLP_UP, layers.MLP_DOWN)
    )
    rules = (
        *llama.outside(facts),
        layers.INPUT_NORM,
        _QKV,
        _QK,
        layers.QUERY_NORM,
        layers.KEY_NORM,
        layers.ATTENTION_OUTPUT,
        gemma3.POST_ATTENTION,
        *mlp,
        gemma3.POST_MLP,
        _LAYER_SCALAR,
    )
    nested = layers.prefixed(rules, _NESTED)
    return WeightTable(
        facts=facts, rules=nested if facts.multimodal else rules, passthrough=_TOWERS
    )
