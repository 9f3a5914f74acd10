"""Makes a small model from a seed: config.json and random weights, without a tokenizer. The result
is a real Hugging Face folder, so later steps treat it like any other. Called by code that prepares
a run or a trial."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

from milescli.models import parse_facts, table

INIT_STD = 0.02
"""Standard deviation of embeddings and matrices, as in the published recipes of this architecture;
norms start at 1."""
EOS_ID, PAD_ID, VISION_START_ID = 2, 0, 3
"""Ids of <|im_end|>, <|endoftext|> and the first token of images, as `data.scratch_tokenizer`
numbers them."""
_NORM = re.compile(r"(norm\d?|ln_q)\.weight$")


class ScratchShape(Protocol):
    """Describes a model to make from scratch: a recipe's `model.scratch`, whose schema documents
    the fields."""

    family: Any
    """qwen3, qwen3_moe or qwen2_5_vl."""
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
    vision_layers: int
    vision_hidden_size: int


def config_of(shape: ScratchShape) -> dict[str, Any]:
    """Return the config.json of the model, in the published format of its family."""
    if shape.family == "qwen2_5_vl":
        return _vision_config(shape)
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


PATCH_SIZE, MERGE_SIZE, WINDOW = 14, 2, 4
"""Pixels of a patch, patches of a token, and tokens of a window of the tower, in each direction."""
MAX_IMAGE_TOKENS = 64


def _vision_config(shape: ScratchShape) -> dict[str, Any]:
    """Return the config of a Qwen2.5-VL model, whose decoder is that of Qwen2."""
    angles = shape.head_dim // 2
    text = {
        "model_type": "qwen2_5_vl_text",
        "bos_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": INIT_STD,
        "intermediate_size": shape.ffn_hidden_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "type": "mrope",
            "rope_theta": shape.rope_theta,
            "mrope_section": [angles - 2 * (angles // 3), angles // 3, angles // 3],
        },
        "tie_word_embeddings": shape.tie_embeddings,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }
    tower = {
        "model_type": "qwen2_5_vl",
        "depth": shape.vision_layers,
        "fullatt_block_indexes": [shape.vision_layers - 1],
        "hidden_act": "silu",
        "hidden_size": shape.vision_hidden_size,
        "intermediate_size": 2 * shape.vision_hidden_size,
        "num_heads": 2,
        "out_hidden_size": shape.hidden_size,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "window_size": PATCH_SIZE * MERGE_SIZE * WINDOW,
    }
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "eos_token_id": EOS_ID,
        "image_token_id": VISION_START_ID + 2,
        "text_config": text,
        "tie_word_embeddings": shape.tie_embeddings,
        "torch_dtype": "float32",
        "video_token_id": VISION_START_ID + 3,
        "vision_config": tower,
        "vision_end_token_id": VISION_START_ID + 1,
        "vision_start_token_id": VISION_START_ID,
    }


def write_config(shape: ScratchShape, folder: Path) -> dict[str, Any]:
    """Write config.json, and for a model that accepts images the config of its image processor;
    return the former."""
    config = config_of(shape)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config.json": config}
    if shape.family == "qwen2_5_vl":
        token = (PATCH_SIZE * MERGE_SIZE) ** 2
        cut = {
            "patch_size": PATCH_SIZE,
            "merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
            "processor_class": "Qwen2_5_VLProcessor",
            "size": {"shortest_edge": token, "longest_edge": MAX_IMAGE_TOKENS * token},
        }
        files["preprocessor_config.json"] = {**cut, "image_processor_type": "Qwen2VLImageProcessor"}
        files["video_preprocessor_config.json"] = {
            **cut,
            "video_processor_type": "Qwen2VLVideoProcessor",
        }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return config


def make_model(shape: ScratchShape, folder: Path, seed: int) -> None:
    """Write config.json and model.safetensors. Equal arguments give equal bytes."""
    _write_weights(write_config(shape, folder), folder, seed=seed, std=INIT_STD)


def make_from_config(
    config: dict[str, Any], folder: Path, *, seed: int, std: float | None = INIT_STD
) -> None:
    """Write a model of any known family. `std` is the standard deviation of embeddings and
    matrices; None: for each matrix, one over the root of its columns, so that its outputs are as
    large as its inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_weights(config, folder, seed=seed, std=std)


def _write_weights(config: dict[str, Any], folder: Path, *, seed: int, std: float | None) -> None:
    """Write random weights to model.safetensors. Each tensor has its own generator."""
    import torch
    from safetensors.torch import save_file

    tensors, facts = {}, parse_facts(config)
    for index, (name, dims) in enumerate(sorted(table(facts).hf_shapes().items())):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        if _NORM.search(name):
            tensors[name] = torch.ones(dims)
        elif name.endswith("tid2eid"):  # experts of a token, by its id
            chosen = torch.rand(dims[0], facts.num_experts, generator=generator).argsort(1)
            tensors[name] = chosen[:, : dims[1]].contiguous()
        elif name.endswith(".bias"):
            tensors[name] = torch.zeros(dims)
        else:
            spread = dims[-1] ** -0.5 if std is None else std
            tensors[name] = torch.randn(dims, generator=generator) * spread
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
