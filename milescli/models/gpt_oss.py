"""gpt-oss: experts everywhere, biases everywhere, attention with sinks, every other layer over a sliding window. Facts from its config, and
its weight table. The releases hold the experts as MXFP4; the names here are those of their bfloat16 form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from milescli.models import fields, layers
from milescli.models.base import COLUMN, EXPERT_COLUMN, EXPERT_ROW, REPLICATED, Rule, WeightTable
from milescli.models.facts import Layer, ModelFacts
from milescli.models.transforms import alone, concatenate, halve, same, shapes

if TYPE_CHECKING:
    from torch import Tensor

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
_LIMIT = 7.0
"""Both halves of an expert's activation are clamped at it."""
_EXPERT = _MEGATRON + "mlp.experts.local_experts.{expert}."


def facts(config: Mapping[str, object]) -> ModelFacts:
    """ModelFacts of a `gpt_oss` config. Raises CheckpointError for what the trainer cannot compute."""
    why = "the releases' own code computes no other"
    fields.refuse(config, "hidden_act", unless="silu", why=why)
    fields.refuse(config, "attention_bias", unless=True, why=why)
    fields.refuse(config, "swiglu_limit", unless=_LIMIT, why=why)
    num_layers = fields.number(config, "num_hidden_layers", default=36, kind=int)
    mixers = fields.mixers(config, num_layers=num_layers, period=("sliding", "full"))
    num_experts = fields.number(config, "num_local_experts", default=128, kind=int)
    return ModelFacts(
        family="gpt_oss",
        num_layers=num_layers,
        layers=tuple(Layer(mixer=mixer, mlp="moe") for mixer in mixers),
        hidden_size=fields.number(config, "hidden_size", default=2880, kind=int),
        num_heads=fields.number(config, "num_attention_heads", default=64, kind=int),
        num_kv_heads=fields.number(config, "num_key_value_heads", default=8, kind=int),
        head_dim=fields.number(config, "head_dim", default=64, kind=int),
        ffn_hidden_size=0,
        moe_ffn_hidden_size=fields.number(config, "intermediate_size", default=2880, kind=int),
        num_experts=num_experts,
        topk=fields.topk(config, "num_experts_per_tok", "experts_per_token", default=4, num_experts=num_experts),
        normalize_topk=True,
        activation="clamped_swiglu",
        activation_limit=_LIMIT,
        mlp_bias=True,
        vocab_size=fields.number(config, "vocab_size", default=201_088, kind=int),
        tied_embeddings=fields.number(config, "tie_word_embeddings", default=False, kind=bool),
        rope=fields.rope(config, theta=150_000.0),
        norm_eps=fields.number(config, "rms_norm_eps", default=1e-5, kind=float),
        max_position_embeddings=fields.number(config, "max_position_embeddings", default=131_072, kind=int),
        qk_norm=False,
        qkv_bias=True,
        attention_output_bias=True,
        attention_sinks=True,
        sliding_window=fields.number(config, "sliding_window", default=128, kind=int),
        dtype=fields.dtype(config),
        eos_token_ids=fields.eos_token_ids(config),
    )


def _untangle(tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Input times (gate 0, up 0, gate 1, up 1, ...), or a bias of these -> gate [f, hidden] and up [f, hidden], or [f] and [f]."""
    (tensor,) = tensors
    rows = tensor.mT if tensor.dim() == 2 else tensor
    return [rows[0::2], rows[1::2]]


def _tangle(parts: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """The inverse of `_untangle`."""
    import torch

    rows = torch.stack(list(parts), dim=1).flatten(0, 1)
    return [rows.mT if rows.dim() == 2 else rows]


def _turn(tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Input times output <-> output times input."""
    return [tensor.mT for tensor in tensors]


def _plain(hf: str, megatron: str, *sizes: str) -> Rule:
    """A tensor that every rank holds as it lies on disk, of the named sizes."""
    return Rule(
        hf=(_HF + hf,),
        megatron=_MEGATRON + megatron,
        shapes=shapes(lambda f: tuple(getattr(f, size) for size in sizes)),
        sharding=REPLICATED,
        fuse=same,
        split=alone,
    )


_ATTENTION_OUTPUT_BIAS = _plain("self_attn.o_proj.bias", "self_attention.linear_proj.bias", "hidden_size")
_SINKS = replace(_plain("self_attn.sinks", "self_attention.core_attention.softmax_offset", "num_heads"), sharding=COLUMN)
_ROUTER = _plain("mlp.router.weight", "mlp.router.weight", "num_experts", "hidden_size")
_ROUTER_BIAS = _plain("mlp.router.bias", "mlp.router.bias", "num_experts")
_EXPERT_UP = Rule(
    hf=(_HF + "mlp.experts.gate_up_proj",),
    megatron=_EXPERT + "linear_fc1.weight",
    shapes=shapes(lambda f: (f.hidden_size, 2 * f.moe_ffn_hidden_size)),
    sharding=EXPERT_COLUMN,
    fuse=concatenate,
    split=halve,
    stacked=True,
    unpack=_untangle,
    pack=_tangle,
)
_EXPERT_UP_BIAS = replace(
    _EXPERT_UP,
    hf=(_HF + "mlp.experts.gate_up_proj_bias",),
    megatron=_EXPERT + "linear_fc1.bias",
    shapes=shapes(lambda f: (2 * f.moe_ffn_hidden_size,)),
)
_EXPERT_DOWN = Rule(
    hf=(_HF + "mlp.experts.down_proj",),
    megatron=_EXPERT + "linear_fc2.weight",
    shapes=shapes(lambda f: (f.moe_ffn_hidden_size, f.hidden_size)),
    sharding=EXPERT_ROW,
    fuse=same,
    split=alone,
    stacked=True,
    unpack=_turn,
    pack=_turn,
)
_EXPERT_DOWN_BIAS = Rule(
    hf=(_HF + "mlp.experts.down_proj_bias",),
    megatron=_EXPERT + "linear_fc2.bias",
    shapes=shapes(lambda f: (f.hidden_size,)),
    sharding=REPLICATED,
    fuse=same,
    split=alone,
    stacked=True,
)


def table(facts: ModelFacts) -> WeightTable:
    """Names and transforms of every weight."""
    rules = (
        layers.EMBEDDING,
        layers.INPUT_NORM,
        layers.QKV,
        layers.QKV_BIAS,
        _SINKS,
        layers.ATTENTION_OUTPUT,
        _ATTENTION_OUTPUT_BIAS,
        layers.MLP_NORM,
        _ROUTER,
        _ROUTER_BIAS,
        _EXPERT_UP,
        _EXPERT_UP_BIAS,
        _EXPERT_DOWN,
        _EXPERT_DOWN_BIAS,
        layers.FINAL_NORM,
        *(() if facts.tied_embeddings else (layers.OUTPUT_LAYER,)),
    )
    return WeightTable(facts=facts, rules=rules)
