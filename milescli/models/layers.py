"""Rules that many families share: embedding, norms, grouped attention, gated MLP, experts. A family file picks from them."""

from __future__ import annotations

from milescli.models.base import COLUMN, EXPERT_COLUMN, EXPERT_ROW, REPLICATED, ROW, VOCABULARY, Rule, Stacked
from milescli.models.transforms import alone, concatenate, fuse_qkv, halve, same, shapes, split_qkv

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."

EMBEDDING = Rule(
    hf=("model.embed_tokens.weight",),
    megatron="embedding.word_embeddings.weight",
    shapes=shapes(lambda f: (f.vocab_size, f.hidden_size)),
    sharding=VOCABULARY,
    fuse=same,
    split=alone,
    layers="none",
)
OUTPUT_LAYER = Rule(
    hf=("lm_head.weight",),
    megatron="output_layer.weight",
    shapes=shapes(lambda f: (f.vocab_size, f.hidden_size)),
    sharding=VOCABULARY,
    fuse=same,
    split=alone,
    layers="none",
)
FINAL_NORM = Rule(
    hf=("model.norm.weight",),
    megatron="decoder.final_layernorm.weight",
    shapes=shapes(lambda f: (f.hidden_size,)),
    sharding=REPLICATED,
    fuse=same,
    split=alone,
    layers="none",
)


def norm(hf: str, megatron: str, *, per_head: bool = False) -> Rule:
    """A norm weight of a layer; `per_head`: of length head_dim instead of hidden_size."""
    return Rule(
        hf=(_HF + hf,),
        megatron=_MEGATRON + megatron,
        shapes=shapes(lambda f: (f.head_dim if per_head else f.hidden_size,)),
        sharding=REPLICATED,
        fuse=same,
        split=alone,
    )


INPUT_NORM = norm("input_layernorm.weight", "input_layernorm.weight")
MLP_NORM = norm("post_attention_layernorm.weight", "pre_mlp_layernorm.weight")
QUERY_NORM = norm("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", per_head=True)
KEY_NORM = norm("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", per_head=True)

QKV = Rule(
    hf=(_HF + "self_attn.q_proj.weight", _HF + "self_attn.k_proj.weight", _HF + "self_attn.v_proj.weight"),
    megatron=_MEGATRON + "self_attention.linear_qkv.weight",
    shapes=shapes(
        lambda f: (f.num_heads * f.head_dim, f.hidden_size),
        lambda f: (f.num_kv_heads * f.head_dim, f.hidden_size),
        lambda f: (f.num_kv_heads * f.head_dim, f.hidden_size),
    ),
    sharding=COLUMN,
    fuse=fuse_qkv,
    split=split_qkv,
)
QKV_BIAS = Rule(
    hf=(_HF + "self_attn.q_proj.bias", _HF + "self_attn.k_proj.bias", _HF + "self_attn.v_proj.bias"),
    megatron=_MEGATRON + "self_attention.linear_qkv.bias",
    shapes=shapes(
        lambda f: (f.num_heads * f.head_dim,),
        lambda f: (f.num_kv_heads * f.head_dim,),
        lambda f: (f.num_kv_heads * f.head_dim,),
    ),
    sharding=COLUMN,
    fuse=fuse_qkv,
    split=split_qkv,
)
ATTENTION_OUTPUT = Rule(
    hf=(_HF + "self_attn.o_proj.weight",),
    megatron=_MEGATRON + "self_attention.linear_proj.weight",
    shapes=shapes(lambda f: (f.hidden_size, f.num_heads * f.head_dim)),
    sharding=ROW,
    fuse=same,
    split=alone,
)

MLP_UP = Rule(
    hf=(_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
    megatron=_MEGATRON + "mlp.linear_fc1.weight",
    shapes=shapes(lambda f: (f.ffn_hidden_size, f.hidden_size), lambda f: (f.ffn_hidden_size, f.hidden_size)),
    sharding=COLUMN,
    fuse=concatenate,
    split=halve,
    layers="dense",
)
MLP_DOWN = Rule(
    hf=(_HF + "mlp.down_proj.weight",),
    megatron=_MEGATRON + "mlp.linear_fc2.weight",
    shapes=shapes(lambda f: (f.hidden_size, f.ffn_hidden_size)),
    sharding=ROW,
    fuse=same,
    split=alone,
    layers="dense",
)

ROUTER = Rule(
    hf=(_HF + "mlp.gate.weight",),
    megatron=_MEGATRON + "mlp.router.weight",
    shapes=shapes(lambda f: (f.num_experts, f.hidden_size)),
    sharding=REPLICATED,
    fuse=same,
    split=alone,
    layers="moe",
)
EXPERT_UP = Rule(
    hf=(_HF + "mlp.experts.{expert}.gate_proj.weight", _HF + "mlp.experts.{expert}.up_proj.weight"),
    megatron=_MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    shapes=shapes(lambda f: (f.moe_ffn_hidden_size, f.hidden_size), lambda f: (f.moe_ffn_hidden_size, f.hidden_size)),
    sharding=EXPERT_COLUMN,
    fuse=concatenate,
    split=halve,
    layers="moe",
    stacked=(
        Stacked(hf=_HF + "mlp.experts.gate_up_proj", part=0, num_parts=2),
        Stacked(hf=_HF + "mlp.experts.gate_up_proj", part=1, num_parts=2),
    ),
)
EXPERT_DOWN = Rule(
    hf=(_HF + "mlp.experts.{expert}.down_proj.weight",),
    megatron=_MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
    shapes=shapes(lambda f: (f.hidden_size, f.moe_ffn_hidden_size)),
    sharding=EXPERT_ROW,
    fuse=same,
    split=alone,
    layers="moe",
    stacked=(Stacked(hf=_HF + "mlp.experts.down_proj"),),
)
