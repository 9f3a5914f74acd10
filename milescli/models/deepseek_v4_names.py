"""DeepSeek-V4's tensors under the names of transformers, from those of the releases
(`layers.0.attn.wq_a.weight`). The weight table calls it."""

from __future__ import annotations

import re

_MODERN: tuple[tuple[str, str], ...] = (
    # the more special ones first
    (r"\.attn\.indexer\.compressor\.ape$", ".attn.compressor.indexer.position_bias"),
    (r"\.attn\.indexer\.compressor\.norm\.", ".attn.compressor.indexer.kv_norm."),
    (r"\.attn\.indexer\.compressor\.", ".attn.compressor.indexer."),
    (r"\.attn\.indexer\.weights_proj\.", ".attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.", ".attn.compressor.indexer."),
    (r"\.attn\.compressor\.ape$", ".attn.compressor.position_bias"),
    (r"\.attn\.compressor\.norm\.", ".attn.compressor.kv_norm."),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.attn\.q_norm\.", ".attn.q_a_norm."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"^hc_head_", "hc_head.hc_"),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"^embed\.", "embed_tokens."),
)
"""Names of the releases -> those of transformers' modules, in this order."""


def modern_name(released: str) -> str:
    """What transformers calls a tensor of the releases."""
    name = released
    for pattern, modern in _MODERN:
        name = re.sub(pattern, modern, name)
    return "model." + name
