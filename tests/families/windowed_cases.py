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
_EXPERTS_CUT = {"tp": 2, "etp": 2, "sequence_parallel": True}
CASES = {
    "gpt-oss": Case(_OSS, layouts=(_EXPERTS_CUT, {"pp": 2})),
    "gpt-oss-one-kv-head": Case(
        {**_OSS, "num_attention_heads": 3, "num_key_value_heads": 1, "num_local_experts": 6, "tie_word_embeddings": True},
        layouts=({"ep": 2, "dp": 2},),
    ),
}
