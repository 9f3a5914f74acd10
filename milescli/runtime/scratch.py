"""A small model made from a seed: config.json, random weights, tokenizer. A real Hugging Face
folder, so nothing downstream knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from milescli.models import parse_facts, table
from milescli.recipe.schema import ScratchModel

INIT_STD = 0.02
"""Of embeddings and matrices, as in the published recipes of this architecture; norms begin at
1."""
EOS_ID, PAD_ID = 2, 0
"""<|im_end|> and <|endoftext|>, as `rollout.scratch_tokenizer` numbers them."""


def config_of(scratch: ScratchModel) -> dict[str, Any]:
    """The config.json of the model, in the published format of its family."""
    moe = scratch.family == "qwen3_moe"
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "model_type": scratch.family,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "head_dim": scratch.head_dim,
        "hidden_act": "silu",
        "hidden_size": scratch.hidden_size,
        "initializer_range": INIT_STD,
        "intermediate_size": scratch.ffn_hidden_size,
        "max_position_embeddings": scratch.max_position_embeddings,
        "num_attention_heads": scratch.num_heads,
        "num_hidden_layers": scratch.num_layers,
        "num_key_value_heads": scratch.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": scratch.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": scratch.tie_embeddings,
        "torch_dtype": "float32",
        "vocab_size": scratch.vocab_size,
    }
    if moe:
        config |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": scratch.moe_ffn_hidden_size,
            "norm_topk_prob": True,
            "num_experts": scratch.num_experts,
            "num_experts_per_tok": scratch.topk,
            "router_aux_loss_coef": 0.0,
        }
    return config


def make_model(scratch: ScratchModel, folder: Path, seed: int) -> None:
    """Write config.json and model.safetensors. Equal arguments give equal bytes: each tensor has a
    generator of its own."""
    import torch
    from safetensors.torch import save_file

    config = config_of(scratch)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for index, (name, shape) in enumerate(sorted(table(parse_facts(config)).hf_shapes().items())):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        is_norm = name.endswith("norm.weight")
        tensors[name] = (
            torch.ones(shape) if is_norm else torch.randn(shape, generator=generator) * INIT_STD
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
