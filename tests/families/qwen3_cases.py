"""Qwen3, dense and with experts."""

from __future__ import annotations

from tests.families.cases import Case

_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "vocab_size": 131,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
_EP = {"ep": 2, "dp": 2}
CASES = {
    "qwen3": Case(_QWEN3),
    "qwen3-tied": Case({**_QWEN3, "tie_word_embeddings": True}),
    "qwen3-moe": Case(_MOE, layouts=(_EP, {"pp": 2})),
}
