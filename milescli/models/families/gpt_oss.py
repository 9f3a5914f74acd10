"""Family gpt-oss: experts and biases in every layer, attention with sinks, and a sliding window in
every other layer. Facts from its config, and its weight table. The releases hold the experts as
MXFP4; the names here are those of their bfloat16 form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from milescli.models import fields, layers
from milescli.models.base import COLUMN, EXPERT_COLUMN, EXPERT_ROW, Rule, WeightTable
from milescli.models.facts import Layer, ModelFacts
from milescli.models.families import llama
from milescli.models.tensor_rules import expert_ffn, hidden, num_experts, tensor_rule
from milescli.models.transforms import concatenate, halve, join, shapes

if TYPE_CHECKING:
    from torch import Tensor

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
_SIZES = {
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201_088,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "sliding_window": 128,
    "eos_token_id": 200_002,
    "torch_dtype": "bfloat16",
}
"""transformers' defaults for fields that a config omits."""
_LIMIT = 7.0
"""Limit to which both halves of an expert's activation are clamped."""
_EXPERT = _MEGATRON + "mlp.experts.local_experts.{expert}."


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `gpt_oss` config. Raises CheckpointError for what the trainer
    cannot compute."""
    why = "the releases' own code computes no other"
    fields.refuse(config, "hidden_act", unless="silu", why=why)
    fields.refuse(config, "attention_bias", unless=True, why=why)
    fields.refuse(config, "swiglu_limit", unless=_LIMIT, why=why)
    read = {**_SIZES, **{name: value for name, value in config.items() if value is not None}}
    num_layers = fields.number(read, "num_hidden_layers", kind=int)
    num_experts = fields.number(config, "num_local_experts", default=128, kind=int)
    mixers = fields.mixers(config, num_layers=num_layers, period=("sliding", "full"))
    return llama.plain_facts(
        read,
        family="gpt_oss",
        num_layers=num_layers,
        layers=tuple(Layer(mixer=mixer, mlp="moe") for mixer in mixers),
        ffn_hidden_size=0,
        moe_ffn_hidden_size=fields.number(read, "intermediate_size", kind=int),
        num_experts=num_experts,
        topk=fields.topk(
            config, "num_experts_per_tok", "experts_per_token", default=4, num_experts=num_experts
        ),
        normalize_topk=True,
        activation="clamped_swiglu",
        activation_limit=_LIMIT,
        mlp_bias=True,
        rope=fields.rope(read, theta=150_000.0),
        qkv_bias=True,
        attention_output_bias=True,
        attention_sinks=True,
        sliding_window=fields.number(read, "sliding_window", kind=int),
    )


def _deinterleave(tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Split an expert's tensor [hidden, 2 * f], with columns gate 0, up 0, gate 1, up 1, ..., into
    gate [f, hidden] and up [f, hidden]; split a bias [2 * f] into [f] and [f]."""
    (tensor,) = tensors
    rows = tensor.mT if tensor.dim() == 2 else tensor
    return [rows[0::2], rows[1::2]]


def _interleave(parts: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Interleave gate and up to the form on disk; inverts `_deinterleave`."""
    rows = join([part.unsqueeze(1) for part in parts], dim=1).flatten(0, 1)
    return [rows.mT if rows.dim() == 2 else rows]


def _transpose(tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Transpose the tensors: [input, output] <-> [output, input]."""
    return [tensor.mT for tensor in tensors]


_SINKS = tensor_rule(
    _HF + "self_attn.sinks",
    _MEGATRON + "self_attention.core_attention.softmax_offset",
    lambda f: f.num_heads,
    sharding=COLUMN,
)
_ROUTER = tensor_rule(
    _HF + "mlp.router.weight", _MEGATRON + "mlp.router.weight", num_experts, hidden
)
_ROUTER_BIAS = tensor_rule(_HF + "mlp.router.bias", _MEGATRON + "mlp.router.bias", num_experts)
_EXPERT_UP = Rule(
    hf=(_HF + "mlp.experts.gate_up_proj",),
    megatron=_EXPERT + "linear_fc1.weight",
    shapes=shapes(lambda f: (f.hidden_size, 2 * f.moe_ffn_hidden_size)),
    sharding=EXPERT_COLUMN,
    fuse=concatenate,
    split=halve,
    stacked=True,
    unpack=_deinterleave,
    pack=_interleave,
)
_EXPERT_UP_BIAS = replace(
    _EXPERT_UP,
    hf=(_HF + "mlp.experts.gate_up_proj_bias",),
    megatron=_EXPERT + "linear_fc1.bias",
    shapes=shapes(lambda f: (2 * f.moe_ffn_hidden_size,)),
)
_EXPERT_DOWN = tensor_rule(
    _HF + "mlp.experts.down_proj",
    _EXPERT + "linear_fc2.weight",
    expert_ffn,
    hidden,
    sharding=EXPERT_ROW,
    stacked=True,
    unpack=_transpose,
    pack=_transpose,
)
_EXPERT_DOWN_BIAS = tensor_rule(
    _HF + "mlp.experts.down_proj_bias", _EXPERT + "linear_fc2.bias", hidden, stacked=True
)


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    rules = (
        *llama.outside(facts),
        *llama.attention(facts),
        _SINKS,
        layers.MLP_NORM,
        _ROUTER,
        _ROUTER_BIAS,
        _EXPERT_UP,
        _EXPERT_UP_BIAS,
        _EXPERT_DOWN,
        _EXPERT_DOWN_BIAS,
    )
    return WeightTable(facts=facts, rules=rules)
