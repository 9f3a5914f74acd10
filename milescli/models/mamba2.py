"""Weights of Mamba-2 layers (arXiv 2405.21060) under the names of Hugging Face and of Megatron's
MambaLayer. A family file takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from milescli.models.base import COLUMN, REPLICATED, ROW, Rule, Sharding, mixer_layers
from milescli.models.facts import Mamba, ModelFacts
from milescli.models.transforms import alone, concatenate, same, shapes

if TYPE_CHECKING:
    from torch import Tensor

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
_LAYERS = mixer_layers("mamba")


def _mamba(facts: ModelFacts) -> Mamba:
    assert facts.mamba is not None, facts.family
    return facts.mamba


def _num_heads(facts: ModelFacts) -> int:
    return _mamba(facts).num_heads


def _inner_size(facts: ModelFacts) -> int:
    return _mamba(facts).inner_size


def _conv_sizes(facts: ModelFacts) -> list[int]:
    """Channels of the convolution: x, B, C."""
    return [_inner_size(facts), *[_mamba(facts).num_groups * _mamba(facts).state_size] * 2]


def _in_proj_sizes(facts: ModelFacts) -> list[int]:
    """Rows of in_proj: the gate z; x, B, C; the time steps dt."""
    return [_inner_size(facts), *_conv_sizes(facts), _num_heads(facts)]


def _cut_alike(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Parts that lie one after the other, each cut by tensor parallelism, `sizes` of them whole."""
    cut, rest = divmod(sum(sizes), tensor.shape[0])
    assert not rest, (sizes, tensor.shape)
    return list(tensor.split([size // cut for size in sizes]))


def _join(parts: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    return [concatenate(parts, facts)]


def _parted(
    name: str,
    *,
    shape: Callable[[ModelFacts], tuple[int, ...]],
    sizes: Callable,
    suffixes: tuple[str, ...],
) -> Rule:
    """A tensor of parts one after the other. Each rank holds its cut of every part, one after the
    other again."""
    return Rule(
        hf=(_HF + name,),
        megatron=_MEGATRON + name,
        shapes=shapes(shape),
        sharding=COLUMN,
        fuse=concatenate,
        split=lambda tensor, facts: _cut_alike(tensor, sizes(facts)),
        where=_LAYERS,
        unpack=lambda tensors, facts: _cut_alike(tensors[0], sizes(facts)),
        pack=_join,
        suffixes=suffixes,
    )


def _single(
    name: str, *, shape: Callable[[ModelFacts], tuple[int, ...]], sharding: Sharding = COLUMN
) -> Rule:
    return Rule(
        hf=(_HF + name,),
        megatron=_MEGATRON + name,
        shapes=shapes(shape),
        sharding=sharding,
        fuse=same,
        split=alone,
        where=_LAYERS,
    )


IN_PROJ = _parted(
    "mixer.in_proj.weight",
    shape=lambda f: (sum(_in_proj_sizes(f)), f.hidden_size),
    sizes=_in_proj_sizes,
    suffixes=(".z", ".x", ".B", ".C", ".dt"),
)
CONV = _parted(
    "mixer.conv1d.weight",
    shape=lambda f: (sum(_conv_sizes(f)), 1, _mamba(f).conv_kernel),
    sizes=_conv_sizes,
    suffixes=(".x", ".B", ".C"),
)
CONV_BIAS = replace(
    _parted(
        "mixer.conv1d.bias",
        shape=lambda f: (sum(_conv_sizes(f)),),
        sizes=_conv_sizes,
        suffixes=(".x", ".B", ".C"),
    ),
    where=lambda facts, layer: _LAYERS(facts, layer) and _mamba(facts).conv_bias,
)
RULES = (
    _single("norm.weight", shape=lambda f: (f.hidden_size,), sharding=REPLICATED),
    _single("mixer.A_log", shape=lambda f: (_num_heads(f),)),
    _single("mixer.D", shape=lambda f: (_num_heads(f),)),
    _single("mixer.dt_bias", shape=lambda f: (_num_heads(f),)),
    IN_PROJ,
    CONV,
    CONV_BIAS,
    _single("mixer.norm.weight", shape=lambda f: (_inner_size(f),)),
    _single("mixer.out_proj.weight", shape=lambda f: (f.hidden_size, _inner_size(f)), sharding=ROW),
)
"""Rules of a layer: its norm and its mixer."""
