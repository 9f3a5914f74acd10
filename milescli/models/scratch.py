"""Makes a small model from a seed: config.json and random weights, without a tokenizer. The result
is a real Hugging Face folder, so nothing downstream can tell. Called by code that prepares a run or
a trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from milescli.models import parse_facts, table

INIT_STD = 0.02
"""Standard deviation of embeddings and matrices, as in the published recipes of this architecture;
norms begin at 1."""
EOS_ID, PAD_ID = 2, 0
"""<|im_end|> and <|endoftext|>, as `rollout.scratch_tokenizer` numbers them."""


class ScratchShape(Protocol):
    """Describes a model to make from scratch: a recipe's `model.scratch`, whose schema documents
    the fields."""

    family: Any
    """qwen3 or qwen3_moe"""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    num_experts: int
    topk: int
    moe_ffn_hidden_size: int
    vocab_size: int
    tie_embeddings: bool
    rope_theta: float
    max_position_embeddings: int


def config_of(shape: ScratchShape) -> dict[str, Any]:
    """Return the config.json of the model, in the published format of its family."""
    moe = shape.family == "qwen3_moe"
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "model_type": shape.family,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": INIT_STD,
        "intermediate_size": shape.ffn_hidden_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": shape.tie_embeddings,
        "torch_dtype": "float32",
        "vocab_size": shape.vocab_size,
    }
    if moe:
        config |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": shape.moe_ffn_hidden_size,
            "norm_topk_prob": True,
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.topk,
            "router_aux_loss_coef": 0.0,
        }
    return config


def make_model(shape: ScratchShape, folder: Path, seed: int) -> None:
    """Write config.json and model.safetensors. Equal arguments give equal bytes: each tensor has
    its own generator."""
    import torch
    from safetensors.torch import save_file

    config = config_of(shape)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for index, (name, dims) in enumerate(sorted(table(parse_facts(config)).hf_shapes().items())):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        is_norm = name.endswith("norm.weight")
        tensors[name] = (
            torch.ones(dims) if is_norm else torch.randn(dims, generator=generator) * INIT_STD
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
