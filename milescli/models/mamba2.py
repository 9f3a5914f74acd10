"""Holds the rules of Mamba-2 layers (arXiv 2405.21060), with the names of Hugging Face and of
Megatron's MambaLayer. A family file uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from milescli.models.base import COLUMN, REPLICATED, ROW, Rule, Sharding, mixer_layers
from milescli.models.facts import Mamba, ModelFacts
from milescli.models.tensor_rules import Size, hidden, tensor_rule
from milescli.models.transforms import concatenate, join_parts, shapes, split_cut_parts

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
    """Return the numbers of channels of the convolution's parts: x, B, C."""
    return [_inner_size(facts), *[_mamba(facts).num_groups * _mamba(facts).state_size] * 2]


def _in_proj_sizes(facts: ModelFacts) -> list[int]:
    """Return the numbers of rows of in_proj's parts: the gate z; x, B, C; the time steps dt."""
    return [_inner_size(facts), *_conv_sizes(facts), _num_heads(facts)]


def _parted(
    name: str,
    *,
    shape: Callable[[ModelFacts], tuple[int, ...]],
    sizes: Callable,
    suffixes: tuple[str, ...],
) -> Rule:
    """Return the rule of a tensor whose parts are stored one after the other. Each rank holds its
    cut of every part, in the same order."""
    return Rule(
        hf=(_HF + name,),
        megatron=_MEGATRON + name,
        shapes=shapes(shape),
        sharding=COLUMN,
        fuse=concatenate,
        split=lambda tensor, facts: split_cut_parts(tensor, sizes(facts)),
        where=_LAYERS,
        unpack=lambda tensors, facts: split_cut_parts(tensors[0], sizes(facts)),
        pack=join_parts,
        suffixes=suffixes,
    )


def _single(name: str, *dims: Size, sharding: Sharding = COLUMN) -> Rule:
    return tensor_rule(_HF + name, _MEGATRON + name, *dims, sharding=sharding, where=_LAYERS)


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
    _single("norm.weight", hidden, sharding=REPLICATED),
    _single("mixer.A_log", _num_heads),
    _single("mixer.D", _num_heads),
    _single("mixer.dt_bias", _num_heads),
    IN_PROJ,
    CONV,
    CONV_BIAS,
    _single("mixer.norm.weight", _inner_size),
    _single("mixer.out_proj.weight", hidden, _inner_size, sharding=ROW),
)
"""Rules of a layer's norm and mixer."""
