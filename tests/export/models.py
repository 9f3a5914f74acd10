"""Small models for the tests of export: their config.json, their folder with random weights, and a
way to read it as the exporter does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from milescli.models import WeightTable, parse_facts, table

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 131,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "dtype": "bfloat16",
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "vocab_size": 131,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size": 131,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "dtype": "bfloat16",
}


def table_of(config: dict[str, object]) -> WeightTable:
    """The weight table."""
    return table(parse_facts(config))


def tensors_of(table: WeightTable, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the table's names, in the dtypes that releases have."""
    generator = torch.Generator().manual_seed(seed)
    wide = {name for entry in table.entries if entry.rule.float32 for name in entry.hf}
    tensors = {}
    for name, shape in table.hf_shapes().items():
        noise = torch.randn(shape, generator=generator)
        tensor = 1 + 0.1 * noise if "norm" in name and len(shape) == 1 else 0.08 * noise
        tensors[name] = tensor if name in wide else tensor.to(torch.bfloat16)
    return tensors


def make_base(
    folder: Path, config: dict[str, object], *, extra: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """A Hugging Face folder with random weights, a tokenizer that nobody reads, and a card with a
    license. Returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {**tensors_of(table_of(config)), **(extra or {})}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# The base model\n")
    return tensors


def trained(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other weights than the base's."""
    return {name: (tensor.float() * 1.25).to(tensor.dtype) for name, tensor in tensors.items()}


def reader_of(tensors: dict[str, torch.Tensor]):
    """`read` of write_folder: what a checkpoint of the run would give, without the MTP layers,
    which it does not train."""

    def read(weights: WeightTable) -> Iterator[tuple[str, torch.Tensor]]:
        for name in dict.fromkeys(
            name for entry in weights.entries if entry.mtp is None for name in entry.hf
        ):
            yield name, tensors[name]

    return read


def weights_of(place: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder as they are stored."""
    files = place.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
