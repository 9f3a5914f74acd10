"""Builds Megatron's layer spec of each layer of a model, from the facts of that layer. Called by
`model`."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from milescli.backends.megatron.architecture import vision
from milescli.backends.megatron.layers import compressed, experts, gated_delta, gemma4, mla
from milescli.backends.megatron.layers.attention import PackedAttention
from milescli.backends.megatron.layers.block import sandwich, with_bias
from milescli.backends.megatron.layers.norm import HeadsNorm, RmsNorm
from milescli.models.facts import Layer, ModelFacts, Rope


def final_norm(*, engine: bool) -> type:
    """Return the class of the norm before the output layer. `engine`: TransformerEngine is used."""
    if not engine:
        return RmsNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def engine_knows(facts: ModelFacts) -> bool:
    """Return True if TransformerEngine's layers can compute this model: full attention with plain
    rotary embeddings, gated SiLU, and no trained MTP layer. Other models use this package's own
    layers, on an accelerator too."""
    plain = facts.rope is not None and facts.rope == Rope(theta=facts.rope.theta)
    alike = all(layer in (Layer(), Layer(mlp="moe")) for layer in facts.layers)
    others = (
        facts.trains_mtp,
        facts.qk_norm_over_heads,
        facts.attention_sinks,
        facts.attention_softcap,
        facts.attention_scale,
        facts.attention_output_gate,
        facts.attention_output_bias,
        facts.mlp_bias,
        facts.sandwich_norms,
    )
    return plain and alike and not any(others) and facts.activation == "silu" and facts.gated_mlp


def layer_spec(
    config: TransformerConfig, facts: ModelFacts, *, layer: int, engine: bool
) -> ModuleSpec:
    """Return the spec of layer `layer` (from 0)."""
    num_experts = facts.num_experts if facts.is_moe_layer(layer) else None
    if engine:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=facts.qk_norm,
        )
        if num_experts:
            experts.adapt(spec.submodules.mlp, facts)
        return spec
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=facts.qk_norm,
        normalization="RMSNorm",
    )
    parts = spec.submodules
    if num_experts:
        experts.adapt(parts.mlp, facts)
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    if facts.layers[layer].mixer == "mla":
        mla.adapt(spec, facts, layer=layer)
        return spec
    if facts.layers[layer].mixer == "compressed":
        return compressed.adapt(spec, facts, layer=layer)
    attention = parts.self_attention.submodules
    attention.core_attention = core_attention(facts, layer=layer)
    if facts.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    if facts.qk_norm_over_heads:
        attention.q_layernorm, attention.k_layernorm = (
            ModuleSpec(module=HeadsNorm, params={"heads": heads})
            for heads in (facts.num_heads, facts.num_kv_heads)
        )
    if facts.layers[layer].mixer == "gated_delta":
        gated_delta.adapt(parts, facts)
    # Megatron has one switch for the biases of all linear layers
    attention.linear_qkv = with_bias(attention.linear_qkv, facts.qkv_bias)
    attention.linear_proj = with_bias(attention.linear_proj, facts.attention_output_bias)
    if facts.sandwich_norms:
        spec = sandwich(spec, norm=RmsNorm)
    spec = gemma4.adapt(spec, facts, layer=layer) if facts.layer_scalar else spec
    return vision.adapt(spec, facts)


def core_attention(facts: ModelFacts, *, layer: int) -> ModuleSpec:
    """Return the spec of the module that combines queries, keys and values in layer `layer` (from
    0)."""
    kind = "unrotated" if facts.layers[layer].unrotated else facts.layers[layer].mixer
    window = facts.sliding_window if kind == "sliding" else 0
    return ModuleSpec(
        module=PackedAttention,
        params={"kind": kind, "window": window, "softcap": facts.attention_softcap},
    )
