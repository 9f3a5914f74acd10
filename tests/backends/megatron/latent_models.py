"""Tiny models of latent and of compressed attention that trainer ranks train. Used by `cases`."""

from __future__ import annotations

LATENT: dict[str, object] = {
    "model_type": "deepseek_v3",
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "q_lora_rank": 18,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale_all_dim": 0.7,
    },
}
MODELS = {
    "latent": LATENT,
    "sparse": {
        **LATENT,
        "model_type": "glm_moe_dsa",
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 3,
        "index_head_dim": 10,
        "index_topk": 6,
        "indexer_types": ["full", "shared", "full"],
    },
    "v4": {
        "model_type": "deepseek_v4",
        "hidden_size": 44,
        "num_hidden_layers": 3,
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
        "index_n_heads": 16,
        "index_head_dim": 8,
        "index_topk": 3,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "hc_mult": 3,
        "sliding_window": 5,
        "max_position_embeddings": 512,
    },
}
"""The last layers of `sparse` lie on stages of their own under pp=2; its sequences are longer than
its indexers' choice."""
