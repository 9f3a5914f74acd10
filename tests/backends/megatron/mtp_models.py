"""Tiny models with an MTP layer that trainer ranks train, of each family. Used by `tiny_models`."""

from __future__ import annotations

from tests.backends.megatron.latent_models import LATENT
from tests.backends.megatron.latent_models import MODELS as LATENT_MODELS

BASE: dict[str, object] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 131,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_DELTA: dict[str, object] = {
    **BASE,
    "rope_parameters": {**BASE["rope_parameters"], "partial_rotary_factor": 0.25},
    "layer_types": ["full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "mtp_num_hidden_layers": 1,
}
_EXPERTS: dict[str, object] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "norm_topk_prob": True,
}
MODELS: dict[str, dict[str, object]] = {
    "mtp": {**LATENT, "num_key_value_heads": 6, "num_nextn_predict_layers": 1},
    "mtpv4": {**LATENT_MODELS["v4"], "num_nextn_predict_layers": 1},
    "mtpglm": {
        **BASE,
        "model_type": "glm4_moe",
        "use_qk_norm": True,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_nextn_predict_layers": 1,
    },
    "mtplite": {
        **{name: value for name, value in LATENT.items() if name != "rope_scaling"},
        "model_type": "glm4_moe_lite",
        "num_hidden_layers": 2,
        "num_key_value_heads": 6,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": BASE["rope_parameters"],
        "num_nextn_predict_layers": 1,
    },
    "mtpmimo": {
        **BASE,
        "model_type": "mimo",
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    },
    "mtpnext": {**_DELTA, **_EXPERTS, "model_type": "qwen3_next"},
    "mtp35": {**_DELTA, "model_type": "qwen3_5_text"},
    "mtp35moe": {**_DELTA, **_EXPERTS, "model_type": "qwen3_5_moe_text"},
}
"""The last decoder layers of those with gated delta nets are such, and their MTP layers are not."""
