"""Gemma 3, Qwen2.5-VL and Qwen3-VL, dense and with experts: the text model here, images in
`tests/backends/megatron/vision_cases.py`."""

from __future__ import annotations

from tests.families.cases import Case
from tests.families.qwen3_cases import CASES as TEXT_CASES

_TEXT = {**TEXT_CASES["qwen3"].config, "head_dim": 16}
del _TEXT["model_type"]
_TOKENS = {
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}
_SECTIONED = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 1, 1]}
_INTERLEAVED = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_TOWER = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
}


def config(family: str, *, text: dict | None = None, tower: dict | None = None, **outer) -> dict:
    """config.json of a tiny model. `text` and `tower` change parts of it."""
    plain = {**_TEXT, "rope_parameters": {"rope_theta": 10000.0, **_INTERLEAVED}}
    sizes = {**_TOWER, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
    if family == "qwen2_5_vl":
        plain |= {"rope_parameters": {"rope_theta": 10000.0, **_SECTIONED}, "head_dim": 8}
        sizes = {**_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
    if family == "qwen3_vl_moe":
        plain |= {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        }
    return {
        "model_type": family,
        "text_config": plain | (text or {}),
        "vision_config": sizes | (tower or {}),
        "tie_word_embeddings": False,
        **_TOKENS,
        **outer,
    }


GEMMA = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 44,
        "vocab_size": 131,
        # an image may be wider than the window, and then its tokens see each other all the same
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 20,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 16,
        "patch_size": 4,
        "vision_use_head": False,
    },
    "mm_tokens_per_image": 4,
    "boi_token_index": 122,
    "eoi_token_index": 123,
    "image_token_index": 120,
}
_EP = {"ep": 2, "dp": 2}
_PP = {"pp": 2, "first_stage_layers": 2}
_TIED = {"tie_word_embeddings": True}
CASES = {
    "gemma3-vl": Case(GEMMA, layouts=({"tp": 2, "sequence_parallel": True}, _PP)),
    "qwen2-5-vl": Case(config("qwen2_5_vl"), layouts=({"tp": 2, "sequence_parallel": True}, _PP)),
    "qwen2-5-vl-tied": Case(config("qwen2_5_vl", text=_TIED, **_TIED), layouts=(_PP,)),
    "qwen3-vl": Case(config("qwen3_vl"), layouts=({"tp": 2, "sequence_parallel": True}, _PP)),
    # its experts lie turned, and come out of Megatron as releases and engines have them
    "qwen3-vl-moe": Case(config("qwen3_vl_moe"), layouts=()),
    "qwen3-vl-moe-released": Case(
        config("qwen3_vl_moe"), layouts=(_EP, _PP), made_by_transformers=False
    ),
}
