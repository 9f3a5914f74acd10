"""Tiny models made from a seed: one of every kind of layer that the trainer builds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from milescli.models import parse_facts, table
from tests.backends.megatron import latent_models, mtp_models

DENSE = {**mtp_models.BASE, "model_type": "qwen3", "num_hidden_layers": 4}
MODELS = {
    **latent_models.MODELS,
    **mtp_models.MODELS,
    "dense": DENSE,
    "tied": {**DENSE, "tie_word_embeddings": True, "num_hidden_layers": 3},
    "wordy": {**DENSE, "num_hidden_layers": 1, "hidden_size": 256, "vocab_size": 40_000},
    "llama": {**DENSE, "model_type": "llama", "num_hidden_layers": 2},
    "mistral": {**DENSE, "model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 5},
    "moe": {
        **DENSE,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "sandwich": {
        **DENSE,
        "model_type": "glm4",
        "num_hidden_layers": 2,
        "partial_rotary_factor": 0.5,
    },
    "glm": {
        **DENSE,
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "intermediate_size": 20,
        "vocab_size": 131,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "final_logit_softcapping": 2.0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
    "oss": {
        "model_type": "gpt_oss",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "vocab_size": 131,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "nemotron": {
        "model_type": "nemotron_h",
        "hidden_size": 44,
        "hybrid_override_pattern": "MEM*-",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 36,
        "vocab_size": 131,
        "mamba_num_heads": 6,
        "mamba_head_dim": 7,
        "n_groups": 2,
        "ssm_state_size": 9,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 28,
        "moe_latent_size": 12,
    },
    "minimax": {
        **DENSE,
        "model_type": "minimax_m2",
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "delta": {
        **DENSE,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 3,
        "mamba_ssm_dtype": "float32",
    },
    "next": {
        **DENSE,
        "model_type": "qwen3_next",
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "partial_rotary_factor": 0.5,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 3,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
}
"""An odd vocabulary, so that tensor parallelism must pad it; three layers, so that two stages are
uneven."""


def make_model(folder: Path, name: str, *, seed: int = 0) -> Path:
    """A Hugging Face folder of one of `MODELS`."""
    return write_model(folder, MODELS[name], seed=seed)


def write_model(folder: Path, config: dict, *, seed: int = 0) -> Path:
    """A Hugging Face folder with random weights, the shapes by the table itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    facts = parse_facts(config)
    for key, shape in table(facts).hf_shapes().items():
        noise = torch.randn(shape, generator=generator)
        centre = 0 if facts.norm_zero_centered and "linear_attn" not in key else 1
        if key.endswith("tid2eid"):
            experts = torch.rand((shape[0], facts.num_experts), generator=generator)
            tensors[key] = experts.argsort(dim=1)[:, : shape[1]].contiguous()
            continue
        is_factor = "norm" in key or "scal" in key
        tensors[key] = (
            centre + 0.1 * noise
            if is_factor
            else noise * (0.3 if key.endswith("mlp.gate.weight") else 0.08)
        )
    save_file(tensors, folder / "model.safetensors")
    return folder
