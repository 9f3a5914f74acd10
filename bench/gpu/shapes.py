"""The models that checks compute with: real shapes with random weights, in small on a CPU. Written
as Hugging Face folders without a tokenizer, on the device, in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from checks import Visit
from safetensors.torch import save_file

from milescli.models import parse_facts, table
from milescli.models.base import WeightTable

PUBLISHED = {"qwen3-0.6b": "Qwen/Qwen3-0.6B", "qwen3-1.7b": "Qwen/Qwen3-1.7B"}
"""Name -> the model whose config.json is taken, from the shapes that ship with the recipes."""
SMALL_MOE = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
"""Difference to Qwen3-30B-A3B: 1.3 billion numbers, 0.5 of them at work for a token."""
ON_CPU = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
}
ON_CPU_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
STD = 0.02
FINAL_NORM = 4.0
"""Of the norm before the output layer: logits as far apart as a trained model's, so that rounding
seldom changes which is the largest."""


def config_of(name: str, visit: Visit) -> dict[str, object]:
    """The config.json of a shape."""
    shapes = Path(__file__).resolve().parents[2] / "templates/shapes.json"
    published = json.loads(shapes.read_text())["models"]
    is_moe = name == "small-moe"
    config = dict(published["Qwen/Qwen3-30B-A3B" if is_moe else PUBLISHED[name]])
    if is_moe:
        config |= SMALL_MOE
    if not visit.on_device:
        config |= ON_CPU | (ON_CPU_MOE if is_moe else {})
    config["architectures"] = ["Qwen3MoeForCausalLM" if is_moe else "Qwen3ForCausalLM"]
    # no token ends a response: lengths are what was asked for
    config["eos_token_id"] = config["vocab_size"] + 7
    return config


def write_model(name: str, visit: Visit, *, seed: int = 0) -> tuple[Path, WeightTable]:
    """The folder below the check's own, in bfloat16 (float32 on a CPU), and the table of its
    weights."""
    config = config_of(name, visit)
    folder = visit.folder / name
    folder.mkdir(parents=True)
    for file in ("config.json", "generation_config.json"):
        (folder / file).write_text(json.dumps(config))
    weights = table(parse_facts(config))
    dtype = torch.bfloat16 if visit.on_device else torch.float32
    generator = torch.Generator(visit.torch_device).manual_seed(seed)
    tensors = {}
    for key, shape in weights.hf_shapes().items():
        if key.endswith("norm.weight"):
            level = FINAL_NORM if key == "model.norm.weight" else 1.0
            tensors[key] = torch.full(shape, level, dtype=dtype)
        else:
            drawn = torch.randn(shape, generator=generator, device=visit.torch_device) * STD
            tensors[key] = drawn.to(dtype).cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if visit.on_device:
        torch.cuda.empty_cache()
    return folder, weights
