"""A tiny DeepSeek-V4 folder as the releases lie on disk: FP8 linear layers in blocks of 128 x 128,
FP4 experts with a scale for 32 numbers, both scales float8_e8m0fnu under `scale`, float32
hyper-connections, BF16 for the rest. Made by table look-up, without the program's own codecs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from milescli import models

CONFIG: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 44,
    "qk_rope_head_dim": 12,
    "vocab_size": 512,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "q_lora_rank": 136,
    "o_groups": 2,
    "o_lora_rank": 33,
    "index_n_heads": 16,
    "index_head_dim": 20,
    "index_topk": 3,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "hc_mult": 3,
    "sliding_window": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
QUANTISED = (
    ".wq_a.",
    ".wq_b.",
    "attn.wkv.",
    ".wo_a.",
    ".wo_b.",
    ".w1.",
    ".w2.",
    ".w3.",
    ".e_proj.",
    ".h_proj.",
)
"""Weights that the releases hold in FP8, or those of routed experts in FP4, each with a tensor of
scales."""
_FLOAT32 = ("hc_", "attn_sink", ".ape", "gate.bias")
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP8 = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).float()


def write_release(folder: Path, **changes: object) -> dict[str, torch.Tensor]:
    """Write the folder, `changes` of CONFIG in it; return the plain tensors, name -> tensor, those
    that are quantised in float32."""
    config = {**CONFIG, **changes}
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    table = models.table(models.parse_facts(config))
    copies = {name for entry in table.entries if entry.rule.optional for name in entry.hf}
    for name, shape in table.hf_shapes().items():
        if name in copies:
            continue
        scale_name = name.removesuffix("weight") + "scale"
        if not any(part in name for part in QUANTISED):
            stored[name] = plain[name] = _plain(name, shape, config, generator)
        elif ".ffn.experts." in name and config["expert_dtype"] == "fp4":
            plain[name], stored[name], stored[scale_name] = _fp4(shape, generator)
        else:
            plain[name], stored[name], stored[scale_name] = _fp8(shape, generator)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return plain


def _plain(
    name: str, shape: tuple[int, ...], config: dict[str, object], generator: torch.Generator
) -> torch.Tensor:
    if name.endswith("tid2eid"):
        experts = int(str(config["n_routed_experts"]))
        return (
            torch.rand(shape[0], experts, generator=generator)
            .argsort(dim=1)[:, : shape[1]]
            .contiguous()
        )
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or name.endswith("_scale"):
        noise = 1 + 0.1 * noise
    else:
        noise *= 0.3 if "gate" in name else 0.08
    return noise if any(part in name for part in _FLOAT32) else noise.to(torch.bfloat16)


def _fp8(
    shape: tuple[int, ...], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(plain, numbers, scales), of all numbers but NaN; blocks at the edges are filled partly."""
    codes = torch.randint(0, 127, shape, generator=generator)
    codes += 128 * torch.randint(0, 2, shape, generator=generator)
    scale = _powers((-(-shape[0] // 128), -(-shape[1] // 128)), -13, generator)
    whole = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    plain = _FP8[codes] * whole[: shape[0], : shape[1]]
    return plain, codes.to(torch.uint8).view(torch.float8_e4m3fn), scale


def _fp4(
    shape: tuple[int, ...], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(plain, numbers, scales); the first of two numbers is in the low half of a byte."""
    codes = torch.randint(0, 16, shape, generator=generator)
    scale = _powers((shape[0], -(-shape[1] // 32)), -6, generator)
    numbers = _FP4[codes % 8] * torch.where(codes > 7, -1.0, 1.0)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    return numbers * scale.float().repeat_interleave(32, 1)[:, : shape[1]], packed, scale


def _powers(shape: tuple[int, ...], exponent: int, generator: torch.Generator) -> torch.Tensor:
    """Powers of two about 2 ** exponent, float8_e8m0fnu."""
    exponents = torch.randint(exponent - 2, exponent + 2, shape, generator=generator)
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
