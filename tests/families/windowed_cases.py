"""gpt-oss, Gemma 3 and Gemma 4: layers that see a window, and what goes with them."""

from __future__ import annotations

from tests.families.cases import Case

_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 20,
    "vocab_size": 131,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 20,
    "vocab_size": 131,
    "query_pre_attn_scalar": 30,
    "sliding_window": 6,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 1.5,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_BESIDE_VISION = {
    "model_type": "gemma3",
    "text_config": {**_GEMMA3, "final_logit_softcapping": None, "num_key_value_heads": 1},
    "vision_config": _SIGLIP,
    "mm_tokens_per_image": 4,
}
_GEMMA4 = {
    "model_type": "gemma4_text",
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 20,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "intermediate_size": 20,
    "vocab_size": 131,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 6,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ],
    "final_logit_softcapping": 1.5,
    "max_position_embeddings": 512,
}
_GEMMA4_EXPERTS = {
    **_GEMMA4,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
}
_GEMMA4_BESIDE_TOWERS = {
    "model_type": "gemma4",
    "text_config": {
        **_GEMMA4_EXPERTS,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_global_key_value_heads": 1,
        "num_experts": 5,
        "tie_word_embeddings": False,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 16,
    },
    "tie_word_embeddings": False,
}
_EXPERTS_CUT = {"tp": 2, "etp": 2, "sequence_parallel": True}
CASES = {
    "gpt-oss": Case(_OSS, layouts=(_EXPERTS_CUT, {"pp": 2})),
    "gpt-oss-one-kv-head": Case(
        {
            **_OSS,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_local_experts": 6,
            "tie_word_embeddings": True,
        },
        layouts=({"ep": 2, "dp": 2},),
    ),
    "gemma3": Case(_GEMMA3),
    "gemma3-untied": Case({**_GEMMA3, "tie_word_embeddings": False}, layouts=({"tp": 2},)),
    "gemma3-beside-vision": Case(_BESIDE_VISION, layouts=({"pp": 2},)),
    "gemma4": Case(_GEMMA4),
    "gemma4-experts": Case(_GEMMA4_EXPERTS, layouts=(_EXPERTS_CUT, {"ep": 2, "dp": 2})),
    "gemma4-beside-towers": Case(_GEMMA4_BESIDE_TOWERS, layouts=({"pp": 2},)),
    "gemma4-separate-values": Case(
        {**_GEMMA4, "attention_k_eq_v": False, "layer_types": None, "num_hidden_layers": 7},
        layouts=({"pp": 2},),
    ),
}
