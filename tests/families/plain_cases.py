"""Llama, Qwen2, Mistral, MiMo, GLM-4 and GLM-4.5: the families of plain attention."""

from __future__ import annotations

from tests.families.cases import Case

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 60,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 44,
    "vocab_size": 137,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_QWEN2 = {
    **{key: value for key, value in _LLAMA.items() if key not in ("head_dim", "rope_parameters")},
    "model_type": "qwen2",
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "rope_theta": 5000.0,
}
_MISTRAL = {
    **_LLAMA,
    "model_type": "mistral",
    "sliding_window": None,
    "rope_parameters": {**_YARN, "truncate": False},
}
_GLM4 = {
    **_LLAMA,
    "model_type": "glm4",
    "head_dim": 12,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "pad_token_id": 0,
    "eos_token_id": [1, 2],
}
_GLM4_MOE = {
    **_GLM4,
    "model_type": "glm4_moe",
    "num_hidden_layers": 5,
    "first_k_dense_replace": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
_MIMO = {
    **_QWEN2,
    "model_type": "mimo",
    "tie_word_embeddings": False,
    "attention_bias": True,
    "num_nextn_predict_layers": 2,
}
_SP = {"tp": 2, "sequence_parallel": True}
_EP = {"ep": 2, "dp": 2}
_PP = {"pp": 2}
_ONE_KV_HEAD = (_PP, {"dp": 2})
CASES = {
    "llama": Case(_LLAMA),
    "llama-tied-biased-yarn": Case(
        {
            **_LLAMA,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _YARN,
        }
    ),
    "qwen2-one-kv-head": Case(_QWEN2, layouts=_ONE_KV_HEAD),
    "qwen2-windows": Case(
        {
            **_QWEN2,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "rope_scaling": {"type": "linear", "factor": 3.0},
        },
        layouts=_ONE_KV_HEAD,
    ),
    "mistral": Case(_MISTRAL),
    "mistral-window": Case({**_MISTRAL, "sliding_window": 4, "tie_word_embeddings": True}),
    "mimo": Case(_MIMO, layouts=_ONE_KV_HEAD, made_by_transformers=False),
    "glm4": Case(_GLM4),
    "glm4-unbiased": Case(
        {**_GLM4, "attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 3},
        layouts=(_PP,),
    ),
    "glm4-moe": Case(_GLM4_MOE, layouts=(_SP, _EP, _PP)),
    "glm4-moe-plain": Case(
        {
            **_GLM4_MOE,
            "use_qk_norm": False,
            "attention_bias": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
        layouts=(_PP,),
    ),
    "glm4-moe-mtp": Case(
        {**_GLM4_MOE, "num_nextn_predict_layers": 1}, layouts=(_PP,), made_by_transformers=False
    ),
}
