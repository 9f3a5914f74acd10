"""What each layer of a model is made of: Megatron's layer spec, from the facts of that layer. Called by `model`."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from milescli.backends.megatron.layers.attention import PackedAttention
from milescli.backends.megatron.layers.norm import RmsNorm
from milescli.models.facts import ModelFacts


def final_norm(*, engine: bool) -> type:
    """The norm before the output layer. `engine`: TransformerEngine is there."""
    if not engine:
        return RmsNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def layer_spec(config: TransformerConfig, facts: ModelFacts, *, layer: int, engine: bool) -> ModuleSpec:
    """Layer `layer` (from 0)."""
    experts = facts.num_experts if facts.is_moe_layer(layer) else None
    if engine:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=facts.qk_norm
        )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=facts.qk_norm, normalization="RMSNorm"
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    attention = parts.self_attention.submodules
    attention.core_attention = core_attention(facts, layer=layer)
    if facts.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return spec


def core_attention(facts: ModelFacts, *, layer: int) -> ModuleSpec:
    """What mixes the heads' queries, keys and values in layer `layer` (from 0)."""
    kind = facts.layers[layer].mixer
    window = facts.sliding_window if kind == "sliding" else 0
    return ModuleSpec(module=PackedAttention, params={"kind": kind, "window": window, "softcap": facts.attention_softcap})
