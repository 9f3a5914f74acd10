"""Multi-head latent attention: DeepSeek-V3 and V3.2, Kimi K2 and K2.5, GLM-4.7-Flash, GLM-5."""

from __future__ import annotations

from tests.families.cases import Case

_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 18,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "vocab_size": 133,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_FROM_TABLE = {"made_by_transformers": False}
_KIMI = {
    **_V3,
    "model_type": "kimi_k2",
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
_LITE = {
    **_V3,
    "model_type": "glm4_moe_lite",
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "dense"],
}
_V32 = {
    **_V3,
    "model_type": "deepseek_v32",
    "num_experts": 12,
    "index_n_heads": 3,
    "index_head_dim": 10,
    "index_topk": 6,
}
_GLM5 = {**_V32, "model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1}
_TP, _PP, _EP = {"tp": 2, "etp": 2, "sequence_parallel": True}, {"pp": 2}, {"ep": 2, "dp": 2}
CASES = {
    "deepseek-v3": Case(_V3, layouts=(_TP, _PP, _EP)),
    "deepseek-v3-dense": Case({**_V3, "first_k_dense_replace": 3}, layouts=()),
    "deepseek-v3-yarn": Case(
        {**_V3, "rope_parameters": _YARN, "tie_word_embeddings": True}, layouts=(_PP,)
    ),
    # Moonlight: no latent of the queries
    "deepseek-v3-direct": Case(
        {
            **_V3,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
        layouts=(_TP,),
    ),
    "deepseek-v3-nextn": Case({**_V3, "num_nextn_predict_layers": 1}, layouts=(), **_FROM_TABLE),
    "deepseek-v3-one-head": Case(
        {
            **_V3,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "v_head_dim": 18,
            "moe_intermediate_size": 22,
        },
        layouts=(_PP,),
    ),
    "kimi-k2": Case(_KIMI, layouts=(_EP,), **_FROM_TABLE),
    "kimi-k25": Case(
        {"model_type": "kimi_k25", "text_config": _KIMI, "vision_config": {}},
        layouts=(_TP,),
        **_FROM_TABLE,
    ),
    "glm4-moe-lite": Case(_LITE, layouts=(_PP,)),
    "deepseek-v32": Case(_V32, layouts=(_TP, _PP)),
    "deepseek-v32-yarn": Case({**_V32, "rope_parameters": _YARN, "index_topk": 3}, layouts=()),
    "glm-moe-dsa": Case(_GLM5, layouts=(_PP,)),
    # values as wide as keys, for which a CPU has a kernel
    "glm-moe-dsa-wide": Case({**_GLM5, "v_head_dim": 16}, layouts=()),
    "glm-moe-dsa-pairs": Case({**_GLM5, "indexer_rope_interleave": True}, layouts=()),
    "glm-moe-dsa-shared": Case(
        {**_GLM5, "indexer_types": ["full", "shared", "full"]}, layouts=(_TP,)
    ),
    "glm-moe-dsa-nextn": Case({**_GLM5, "num_nextn_predict_layers": 1}, layouts=(), **_FROM_TABLE),
}
