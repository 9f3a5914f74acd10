"""Families that differ from an older one in fields, names and gates: MiniMax-M2, Hunyuan 3, Solar
Open, SmolLM3."""

from __future__ import annotations

from tests.families.cases import Case

_BASE = {
    "hidden_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 133,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_MOE = {**_BASE, "head_dim": 10, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_MINIMAX = {
    **_MOE,
    "model_type": "minimax_m2",
    "num_local_experts": 6,
    "intermediate_size": 20,
    "rope_parameters": {**_BASE["rope_parameters"], "partial_rotary_factor": 0.6},
}
_HUNYUAN = {
    **_MOE,
    "model_type": "hy_v3",
    "intermediate_size": 36,
    "num_experts": 6,
    "mlp_layer_types": ["sparse", "dense", "sparse"],
}
_SOLAR = {**_MOE, "model_type": "solar_open", "n_routed_experts": 6, "routed_scaling_factor": 1.7}
_SMOL = {**_BASE, "hidden_size": 48, "model_type": "smollm3", "intermediate_size": 36}
_TP, _PP, _EP = {"tp": 2, "etp": 2, "sequence_parallel": True}, {"pp": 2}, {"ep": 2, "dp": 2}
CASES = {
    "minimax-m2": Case(_MINIMAX, layouts=(_TP, _PP, _EP)),
    "minimax-m2-one-head": Case(
        {**_MINIMAX, "num_attention_heads": 3, "num_key_value_heads": 1, "num_local_experts": 5},
        layouts=(_PP,),
    ),
    "hy-v3": Case(_HUNYUAN, layouts=(_TP, _PP, _EP)),
    "hy-v3-plain": Case(
        {
            **{name: value for name, value in _HUNYUAN.items() if name != "mlp_layer_types"},
            "num_shared_experts": 2,
            "router_scaling_factor": 1.3,
            "tie_word_embeddings": True,
        },
        layouts=(_EP,),
    ),
    "solar-open": Case(_SOLAR, layouts=(_TP, _PP, _EP)),
    "solar-open-groups": Case(
        {**_SOLAR, "n_group": 3, "topk_group": 2, "n_shared_experts": 2}, layouts=(_EP,)
    ),
    "smollm3": Case({**_SMOL, "num_hidden_layers": 5}, layouts=({"tp": 2}, _PP)),
    "smollm3-named": Case(
        {**_SMOL, "no_rope_layers": [0, 1, 1], "tie_word_embeddings": False, "mlp_bias": True},
        layouts=({"cp": 2},),
    ),
}
