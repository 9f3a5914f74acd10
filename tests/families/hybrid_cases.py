"""Qwen3-Next and Qwen3.5 (which Qwen3.6 is too): gated delta nets, gated attention, shared experts,
towers beside the text."""

from __future__ import annotations

from tests.families.cases import Case

_TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 40,
    "vocab_size": 131,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
    "num_position_embeddings": 4,
    "temporal_patch_size": 1,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 12,
}
_MOE_TEXT = (
    {key: value for key, value in _TEXT.items() if key != "intermediate_size"}
    | _EXPERTS
    | {"model_type": "qwen3_5_moe_text"}
)
_NEXT = (
    {
        key: value
        for key, value in _TEXT.items()
        if key not in ("layer_types", "mtp_num_hidden_layers")
    }
    | _EXPERTS
    | {
        "model_type": "qwen3_next",
        "full_attention_interval": 2,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "partial_rotary_factor": 0.5,
        },
    }
)
_EP = {"ep": 2, "dp": 2}
_BOTH = {"tp": 2, "sequence_parallel": True}


def _beside_vision(text: dict, model_type: str, **outer: object) -> dict:
    return {"model_type": model_type, "text_config": text, "vision_config": _VISION, **outer}


_ONE_HEAD = {
    **_TEXT,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
}
_THREE_KEY_HEADS = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "mamba_ssm_dtype": "float32",
}
CASES = {
    "qwen3-5": Case(_TEXT, layouts=(_BOTH, {"pp": 2}, {"cp": 2})),
    "qwen3-5-tied-beside-vision": Case(
        _beside_vision(_TEXT, "qwen3_5", tie_word_embeddings=True), layouts=({"tp": 2},)
    ),
    "qwen3-5-mtp-one-head": Case(_ONE_HEAD, layouts=({"pp": 2},), made_by_transformers=False),
    "qwen3-5-moe": Case(_MOE_TEXT, layouts=(_BOTH, _EP)),
    "qwen3-5-moe-stacked-beside-vision": Case(
        _beside_vision(_MOE_TEXT | _THREE_KEY_HEADS, "qwen3_5_moe"),
        layouts=(_EP, {"pp": 2}),
        made_by_transformers=False,
    ),
    "qwen3-5-moe-beside-vision": Case(_beside_vision(_MOE_TEXT, "qwen3_5_moe"), layouts=()),
    "qwen3-next": Case(_NEXT, layouts=(_BOTH, _EP, {"pp": 2})),
    "qwen3-next-mtp": Case(
        _NEXT | {"tie_word_embeddings": True, "num_experts": 5},
        layouts=({"pp": 2},),
        made_by_transformers=False,
    ),
}
