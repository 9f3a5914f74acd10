"""Holds the rules of gated delta nets (arXiv 2412.06464): how Hugging Face and Megatron store their
weights. A family file picks the form that its folders have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from milescli.models.base import COLUMN, ROW, Rule, mixer_layers
from milescli.models.facts import GatedDelta, ModelFacts
from milescli.models.tensor_rules import hidden, tensor_rule
from milescli.models.transforms import concatenate, join, join_parts, shapes, split_cut_parts

if TYPE_CHECKING:
    from torch import Tensor

_HF = "model.layers.{layer}.linear_attn."
_MEGATRON = "decoder.layers.{layer}.self_attention."


def _delta(facts: ModelFacts) -> GatedDelta:
    assert facts.gated_delta is not None, facts.family
    return facts.gated_delta


def _key_size(facts: ModelFacts) -> int:
    return _delta(facts).num_key_heads * _delta(facts).key_head_dim


def _value_size(facts: ModelFacts) -> int:
    return _delta(facts).num_value_heads * _delta(facts).value_head_dim


def _num_values(facts: ModelFacts) -> int:
    return _delta(facts).num_value_heads


def _qkv_sizes(facts: ModelFacts) -> list[int]:
    return [_key_size(facts), _key_size(facts), _value_size(facts)]


def _in_proj_sizes(facts: ModelFacts) -> list[int]:
    return [*_qkv_sizes(facts), _value_size(facts), _num_values(facts), _num_values(facts)]


def _split_qkv(tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    (tensor,) = tensors
    return list(tensor.split(_qkv_sizes(facts)))


def _ungroup(tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Split Qwen3-Next's form on disk into the six parts. It stores per key head its query, key,
    values and gates in one tensor, and its betas and alphas in another."""
    qkvz, ba = tensors
    delta = _delta(facts)
    per_key = delta.num_value_heads // delta.num_key_heads
    values = per_key * delta.value_head_dim
    first = qkvz.reshape(delta.num_key_heads, -1, *qkvz.shape[1:])
    second = ba.reshape(delta.num_key_heads, -1, *ba.shape[1:])
    parts = (
        *first.split([delta.key_head_dim, delta.key_head_dim, values, values], dim=1),
        *second.split(per_key, dim=1),
    )
    return [part.reshape(-1, *part.shape[2:]) for part in parts]


def _group(parts: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Join the six parts to Qwen3-Next's form on disk; inverts `_ungroup`."""
    per_key = [part.reshape(_delta(facts).num_key_heads, -1, *part.shape[1:]) for part in parts]
    joined = (join(per_key[:4], dim=1), join(per_key[4:], dim=1))
    return [part.reshape(-1, *part.shape[2:]) for part in joined]


def _separate(tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Split Qwen3.5's form on disk into the six parts. It stores query, key and value in one
    tensor, then gate, beta and alpha in one each."""
    return [*_split_qkv(tensors[:1], facts), *tensors[1:]]


def _together(parts: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Join the six parts to Qwen3.5's form on disk; inverts `_separate`."""
    return [concatenate(parts[:3], facts), *parts[3:]]


_LINEAR = mixer_layers("gated_delta")

SEPARATE_IN_PROJ = Rule(
    hf=tuple(_HF + f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
    megatron=_MEGATRON + "in_proj.weight",
    shapes=shapes(
        lambda f: (sum(_qkv_sizes(f)), f.hidden_size),
        lambda f: (_value_size(f), f.hidden_size),
        lambda f: (_num_values(f), f.hidden_size),
        lambda f: (_num_values(f), f.hidden_size),
    ),
    sharding=COLUMN,
    fuse=concatenate,
    split=lambda tensor, facts: split_cut_parts(tensor, _in_proj_sizes(facts)),
    where=_LINEAR,
    unpack=_separate,
    pack=_together,
    suffixes=(".query", ".key", ".value", ".z", ".beta", ".alpha"),
)
"""Rule of the input projection in Qwen3.5's form."""
GROUPED_IN_PROJ = replace(
    SEPARATE_IN_PROJ,
    hf=(_HF + "in_proj_qkvz.weight", _HF + "in_proj_ba.weight"),
    shapes=shapes(
        lambda f: (2 * (_key_size(f) + _value_size(f)), f.hidden_size),
        lambda f: (2 * _num_values(f), f.hidden_size),
    ),
    unpack=_ungroup,
    pack=_group,
)
"""Rule of the input projection in Qwen3-Next's form."""
_CONV = Rule(
    hf=(_HF + "conv1d.weight",),
    megatron=_MEGATRON + "conv1d.weight",
    shapes=shapes(lambda f: (sum(_qkv_sizes(f)), 1, _delta(f).conv_kernel)),
    sharding=COLUMN,
    fuse=concatenate,
    split=lambda tensor, facts: split_cut_parts(tensor, _qkv_sizes(facts)),
    where=_LINEAR,
    unpack=_split_qkv,
    pack=join_parts,
    suffixes=(".query", ".key", ".value"),
)
_DECAY = tensor_rule(
    _HF + "A_log", _MEGATRON + "A_log", _num_values, sharding=COLUMN, where=_LINEAR
)
_STEP = replace(_DECAY, hf=(_HF + "dt_bias",), megatron=_MEGATRON + "dt_bias")
_NORM = tensor_rule(
    _HF + "norm.weight",
    _MEGATRON + "out_norm.weight",
    lambda f: _delta(f).value_head_dim,
    where=_LINEAR,
)
"""The only norm of these families that is not zero-centered."""
_OUTPUT = tensor_rule(
    _HF + "out_proj.weight",
    _MEGATRON + "out_proj.weight",
    hidden,
    _value_size,
    sharding=ROW,
    where=_LINEAR,
)


def others(facts: ModelFacts) -> tuple[Rule, ...]:
    """Return the rules of a gated delta net except its input projection."""
    wide = _delta(facts).float32
    return (_CONV, replace(_DECAY, float32=wide), _STEP, replace(_NORM, float32=wide), _OUTPUT)
