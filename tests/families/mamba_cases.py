"""Nemotron-H: Mamba-2, attention without positions, MLP and experts in the order of a pattern.
DeepSeek-V4: names and bits."""

from __future__ import annotations

from tests.families.cases import Case

_DENSE = {
    "model_type": "nemotron_h",
    "hidden_size": 44,
    "hybrid_override_pattern": "M-M*-",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 36,
    "vocab_size": 131,
    "mamba_num_heads": 6,
    "mamba_head_dim": 7,
    "n_groups": 2,
    "ssm_state_size": 9,
    "conv_kernel": 4,
    "chunk_size": 8,
    "layer_norm_epsilon": 1e-4,
    "use_mamba_kernels": False,
    "max_position_embeddings": 512,
}
_MOE = {
    **_DENSE,
    "hybrid_override_pattern": "ME*-E",
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
_LATENT = {**_MOE, "moe_latent_size": 12, "n_group": 1, "hybrid_override_pattern": "MEM*E"}
_V4 = {
    "model_type": "deepseek_v4",
    "hidden_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "qk_rope_head_dim": 4,
    "vocab_size": 131,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "q_lora_rank": 18,
    "o_groups": 2,
    "o_lora_rank": 10,
    # with few heads many scores are 0, and what is chosen among equals depends on the length
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 3,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 1,
    "hc_mult": 3,
    "sliding_window": 8,
}
_V4_KINDS = {
    "layer_types": [
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "sliding_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
}
_EP = {"ep": 2, "dp": 2}
_ETP = {"tp": 2, "etp": 2, "sequence_parallel": True}
CASES = {
    "nemotron-h": Case(_DENSE),
    "nemotron-h-one-of-each": Case(
        {
            **_DENSE,
            "num_key_value_heads": 1,
            "n_groups": 1,
            "mamba_num_heads": 5,
            "use_conv_bias": False,
        },
        layouts=({"pp": 2},),
    ),
    "nemotron-h-moe": Case(_MOE, layouts=(_EP, _ETP)),
    "nemotron-h-latent-mtp": Case(
        {**_LATENT, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
        layouts=(_ETP, {"pp": 2}),
        made_by_transformers=False,
    ),
    "deepseek-v4": Case(_V4, layouts=(_ETP, {"pp": 2}, _EP)),
    "deepseek-v4-released": Case(_V4, layouts=(_ETP,), made_by_transformers=False),
    "deepseek-v4-small-rates": Case(
        {
            **{name: value for name, value in _V4.items() if name != "compress_ratios"},
            **_V4_KINDS,
            "num_attention_heads": 5,
            "o_groups": 1,
            "hc_mult": 4,
            "sliding_window": 3,
            "index_topk": 2,
            "swiglu_limit": 0.4,
            "routed_scaling_factor": 2.5,
        },
        layouts=({"pp": 2},),
    ),
}
