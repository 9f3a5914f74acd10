"""Rules that many families share: embedding, norms, grouped attention, gated MLP, experts. A family
file picks from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from milescli.models.base import (
    COLUMN,
    EXPERT_COLUMN,
    EXPERT_ROW,
    REPLICATED,
    ROW,
    VOCABULARY,
    Rule,
    Sharding,
    Where,
    dense_layers,
    every_layer,
    moe_layers,
)
from milescli.models.facts import ModelFacts
from milescli.models.transforms import (
    alone,
    concatenate,
    fuse_qkv,
    halve,
    join_halves,
    same,
    shapes,
    split_halves,
    split_qkv,
)

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
MTP = "mtp.layers.{mtp}."

EMBEDDING = Rule(
    hf=("model.embed_tokens.weight",),
    megatron="embedding.word_embeddings.weight",
    shapes=shapes(lambda f: (f.vocab_size, f.hidden_size)),
    sharding=VOCABULARY,
    fuse=same,
    split=alone,
    block="outside",
)
OUTPUT_LAYER = Rule(
    hf=("lm_head.weight",),
    megatron="output_layer.weight",
    shapes=shapes(lambda f: (f.vocab_size, f.hidden_size)),
    sharding=VOCABULARY,
    fuse=same,
    split=alone,
    block="outside",
)
FINAL_NORM = Rule(
    hf=("model.norm.weight",),
    megatron="decoder.final_layernorm.weight",
    shapes=shapes(lambda f: (f.hidden_size,)),
    sharding=REPLICATED,
    fuse=same,
    split=alone,
    block="outside",
)


def norm(hf: str, megatron: str, *, per_head: bool = False, where: Where = every_layer) -> Rule:
    """Return the rule of a layer's norm weight; `per_head` means length head_dim instead of
    hidden_size."""
    return Rule(
        hf=(_HF + hf,),
        megatron=_MEGATRON + megatron,
        shapes=shapes(lambda f: (f.head_dim if per_head else f.hidden_size,)),
        sharding=REPLICATED,
        fuse=same,
        split=alone,
        where=where,
    )


def prefixed(rules: tuple[Rule, ...], prefix: str) -> tuple[Rule, ...]:
    """Return the rules with `prefix` in place of `model.` in their names on disk."""
    return tuple(
        replace(
            rule,
            hf=tuple(
                prefix + name.removeprefix("model.") if name.startswith("model.") else name
                for name in rule.hf
            ),
            alternatives=prefixed(rule.alternatives, prefix),
        )
        for rule in rules
    )


def renamed(rules: tuple[Rule, ...], names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Return the rules with parts of their names on disk replaced, in the order of `names`; other
    forms keep theirs."""

    def new(name: str) -> str:
        for part, own in names.items():
            name = name.replace(part, own)
        return name

    return tuple(replace(rule, hf=tuple(map(new, rule.hf))) for rule in rules)


def in_mtp(rules: tuple[Rule, ...], *, hf: str = _HF) -> tuple[Rule, ...]:
    """Return the rules of a decoder layer as part of a multi-token-prediction layer. `hf` is the
    prefix of its names on disk, with {layer} (num_layers + number) or {mtp} (number)."""
    return tuple(
        replace(
            rule,
            hf=tuple(hf + name.removeprefix(_HF) for name in rule.hf),
            megatron=MTP + "transformer_layer." + rule.megatron.removeprefix(_MEGATRON),
            block="mtp",
            alternatives=in_mtp(rule.alternatives, hf=hf),
        )
        for rule in rules
    )


INPUT_NORM = norm("input_layernorm.weight", "input_layernorm.weight")
MLP_NORM = norm("post_attention_layernorm.weight", "pre_mlp_layernorm.weight")
QUERY_NORM = norm("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", per_head=True)
KEY_NORM = norm("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", per_head=True)
QUERY_NORM_OVER_HEADS = replace(
    QUERY_NORM, shapes=shapes(lambda f: (f.num_heads * f.head_dim,)), sharding=COLUMN
)
KEY_NORM_OVER_HEADS = replace(
    KEY_NORM, shapes=shapes(lambda f: (f.num_kv_heads * f.head_dim,)), sharding=COLUMN
)

QKV = Rule(
    hf=(
        _HF + "self_attn.q_proj.weight",
        _HF + "self_attn.k_proj.weight",
        _HF + "self_attn.v_proj.weight",
    ),
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
    hf=(
        _HF + "self_attn.q_proj.bias",
        _HF + "self_attn.k_proj.bias",
        _HF + "self_attn.v_proj.bias",
    ),
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

ATTENTION_OUTPUT_BIAS = Rule(
    hf=(_HF + "self_attn.o_proj.bias",),
    megatron=_MEGATRON + "self_attention.linear_proj.bias",
    shapes=shapes(lambda f: (f.hidden_size,)),
    sharding=REPLICATED,
    fuse=same,
    split=alone,
)

MLP_UP = Rule(
    hf=(_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
    megatron=_MEGATRON + "mlp.linear_fc1.weight",
    shapes=shapes(
        lambda f: (f.ffn_hidden_size, f.hidden_size), lambda f: (f.ffn_hidden_size, f.hidden_size)
    ),
    sharding=COLUMN,
    fuse=concatenate,
    split=halve,
    where=dense_layers,
)
MLP_DOWN = Rule(
    hf=(_HF + "mlp.down_proj.weight",),
    megatron=_MEGATRON + "mlp.linear_fc2.weight",
    shapes=shapes(lambda f: (f.hidden_size, f.ffn_hidden_size)),
    sharding=ROW,
    fuse=same,
    split=alone,
    where=dense_layers,
)

MLP_UP_BIAS = Rule(
    hf=(_HF + "mlp.gate_proj.bias", _HF + "mlp.up_proj.bias"),
    megatron=_MEGATRON + "mlp.linear_fc1.bias",
    shapes=shapes(lambda f: (f.ffn_hidden_size,), lambda f: (f.ffn_hidden_size,)),
    sharding=COLUMN,
    fuse=concatenate,
    split=halve,
    where=dense_layers,
)
MLP_DOWN_BIAS = Rule(
    hf=(_HF + "mlp.down_proj.bias",),
    megatron=_MEGATRON + "mlp.linear_fc2.bias",
    shapes=shapes(lambda f: (f.hidden_size,)),
    sharding=REPLICATED,
    fuse=same,
    split=alone,
    where=dense_layers,
)
FUSED_MLP_UP = Rule(
    hf=(_HF + "mlp.gate_up_proj.weight",),
    megatron=_MEGATRON + "mlp.linear_fc1.weight",
    shapes=shapes(lambda f: (2 * f.ffn_hidden_size, f.hidden_size)),
    sharding=COLUMN,
    fuse=concatenate,
    split=halve,
    where=dense_layers,
    unpack=split_halves,
    pack=join_halves,
)

ROUTER = Rule(
    hf=(_HF + "mlp.gate.weight",),
    megatron=_MEGATRON + "mlp.router.weight",
    shapes=shapes(lambda f: (f.num_experts, f.hidden_size)),
    sharding=REPLICATED,
    fuse=same,
    split=alone,
    where=moe_layers,
)
_STACKED_UP = Rule(
    hf=(_HF + "mlp.experts.gate_up_proj",),
    megatron=_MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    shapes=shapes(lambda f: (2 * f.moe_ffn_hidden_size, f.hidden_size)),
    sharding=EXPERT_COLUMN,
    fuse=concatenate,
    split=halve,
    where=moe_layers,
    stacked=True,
    unpack=split_halves,
    pack=join_halves,
)
_STACKED_DOWN = Rule(
    hf=(_HF + "mlp.experts.down_proj",),
    megatron=_MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
    shapes=shapes(lambda f: (f.hidden_size, f.moe_ffn_hidden_size)),
    sharding=EXPERT_ROW,
    fuse=same,
    split=alone,
    where=moe_layers,
    stacked=True,
)
EXPERT_UP = Rule(
    hf=(_HF + "mlp.experts.{expert}.gate_proj.weight", _HF + "mlp.experts.{expert}.up_proj.weight"),
    megatron=_MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    shapes=shapes(
        lambda f: (f.moe_ffn_hidden_size, f.hidden_size),
        lambda f: (f.moe_ffn_hidden_size, f.hidden_size),
    ),
    sharding=EXPERT_COLUMN,
    fuse=concatenate,
    split=halve,
    where=moe_layers,
    alternatives=(_STACKED_UP,),
)
EXPERT_DOWN = Rule(
    hf=(_HF + "mlp.experts.{expert}.down_proj.weight",),
    megatron=_MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
    shapes=shapes(lambda f: (f.hidden_size, f.moe_ffn_hidden_size)),
    sharding=EXPERT_ROW,
    fuse=same,
    split=alone,
    where=moe_layers,
    alternatives=(_STACKED_DOWN,),
)

ROUTER_BIAS = Rule(
    hf=(_HF + "mlp.gate.e_score_correction_bias",),
    megatron=_MEGATRON + "mlp.router.expert_bias",
    shapes=shapes(lambda f: (f.num_experts,)),
    sharding=REPLICATED,
    fuse=same,
    split=alone,
    where=moe_layers,
    buffer=True,
    float32=True,
)


def shared_experts(hf: str = "mlp.shared_experts.") -> tuple[Rule, Rule]:
    """Return the rules of the experts that every token uses, concatenated into one gated MLP. `hf`
    is the prefix of their names on disk within a layer."""
    up = Rule(
        hf=(_HF + hf + "gate_proj.weight", _HF + hf + "up_proj.weight"),
        megatron=_MEGATRON + "mlp.shared_experts.linear_fc1.weight",
        shapes=shapes(*[lambda f: (f.shared_expert_ffn_hidden_size, f.hidden_size)] * 2),
        sharding=COLUMN,
        fuse=concatenate,
        split=halve,
        where=moe_layers,
    )
    down = Rule(
        hf=(_HF + hf + "down_proj.weight",),
        megatron=_MEGATRON + "mlp.shared_experts.linear_fc2.weight",
        shapes=shapes(lambda f: (f.hidden_size, f.shared_expert_ffn_hidden_size)),
        sharding=ROW,
        fuse=same,
        split=alone,
        where=moe_layers,
    )
    return up, down


SHARED_UP, SHARED_DOWN = shared_experts()
SHARED_GATE = Rule(
    hf=(_HF + "mlp.shared_expert_gate.weight",),
    megatron=_MEGATRON + "mlp.shared_experts.gate_weight",
    shapes=shapes(lambda f: (1, f.hidden_size)),
    sharding=REPLICATED,
    fuse=same,
    split=alone,
    where=moe_layers,
)


def mtp_part(
    hf: str,
    megatron: str,
    shape: Callable[[ModelFacts], tuple[int, ...]],
    *,
    sharding: Sharding = REPLICATED,
) -> Rule:
    """Return the rule of a tensor outside the decoder layer of a multi-token-prediction layer. `hf`
    is its whole name, `megatron` its name within that layer."""
    return Rule(
        hf=(hf,),
        megatron=MTP + megatron,
        shapes=shapes(shape),
        sharding=sharding,
        fuse=same,
        split=alone,
        block="mtp",
    )


def mtp_norm(hf: str, megatron: str) -> Rule:
    """Return the rule of a norm of hidden_size outside that decoder layer."""
    return mtp_part(hf, megatron, lambda f: (f.hidden_size,))


MTP_FRAME = (
    mtp_norm(_HF + "enorm.weight", "enorm.weight"),
    mtp_norm(_HF + "hnorm.weight", "hnorm.weight"),
    mtp_part(
        _HF + "eh_proj.weight",
        "eh_proj.weight",
        lambda f: (f.hidden_size, 2 * f.hidden_size),
        sharding=COLUMN,
    ),
    mtp_norm(_HF + "shared_head.norm.weight", "final_layernorm.weight"),
    *(
        replace(
            mtp_part(
                _HF + hf, megatron, lambda f: (f.vocab_size, f.hidden_size), sharding=VOCABULARY
            ),
            optional=True,
        )
        for hf, megatron in (
            ("embed_tokens.weight", "embedding.word_embeddings.weight"),
            ("shared_head.head.weight", "output_layer.weight"),
        )
    ),
)
"""What stands around the layer in a multi-token-prediction layer (arXiv 2412.19437, section 2.2)
under DeepSeek's names, which GLM uses too: norms, the projection of embedding and hidden state, the
norm after the layer, and copies of embedding and output layer that some releases hold. Megatron's
module shares those two with the model; the copies lie beside it under names of their own, so that a
folder comes back as it was."""
