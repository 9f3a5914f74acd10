"""Translates TransformerEngine's names of weights to those of Megatron-Core's own modules, which
the weight tables use: TransformerEngine fuses a norm into the linear layer after it, and experts
into one grouped layer. No other module knows these names; called by the trainer and the
checkpoints."""

from __future__ import annotations

import re

_LAYER = r"(layers\.\d+(?:\.\w+_layer)?)"
"""Pattern of a decoder layer, or of the one within a multi-token-prediction layer."""
_FUSED_NORMS: tuple[tuple[str, str, str], ...] = (
    ("plain", "input_layernorm", "self_attention.linear_qkv"),
    ("gated_delta", "input_layernorm", "self_attention.in_proj"),
    ("any", "pre_mlp_layernorm", "mlp.linear_fc1"),
    ("mla", "self_attention.q_layernorm", "self_attention.linear_q_up_proj"),
    ("mla", "self_attention.kv_layernorm", "self_attention.linear_kv_up_proj"),
    ("mamba", "norm", "mixer.in_proj"),
)
"""(mixer of the layer, the separate norm, the linear layer that it is fused into)"""
_FUSE = tuple(
    (mixer, re.compile(rf"{_LAYER}\.{norm}\.(\w+)$"), rf"\1.{linear}.layer_norm_\2")
    for mixer, norm, linear in _FUSED_NORMS
)
_OWN = (
    *(
        (re.compile(rf"{_LAYER}\.{linear}\.layer_norm_(\w+)$"), rf"\1.{norm}.\2")
        for _, norm, linear in _FUSED_NORMS
    ),
    (
        re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"),
        r"mlp.experts.local_experts.\2.\1.weight",
    ),
)


def fused_names(name: str, *, mixer: str) -> list[str]:
    """Return the names of a parameter when TransformerEngine fuses its norm into a linear layer;
    none if the name is not such a norm. `mixer` is the layer's token mixer, as in `Layer`."""
    kinds = {"any", mixer, *(("plain",) if mixer != "mamba" else ())}
    return [
        pattern.sub(fused, name)
        for kind, pattern, fused in _FUSE
        if kind in kinds and pattern.search(name)
    ]


def megatron_name(name: str) -> str:
    """Return the name of a parameter in Megatron-Core's own module, given either form."""
    for pattern, own in _OWN:
        name = pattern.sub(own, name)
    return name
