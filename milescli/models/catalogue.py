"""Lists the model families by name, and the evidence for each, for `miles models` and the docs.
`tests/families/record.py` writes the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from milescli.core.files import read_json

RELEASES: dict[str, str] = {
    "llama": "Llama 3.x, DeepSeek-R1-Distill-Llama",
    "qwen2": "Qwen2.5, DeepSeek-R1-Distill-Qwen",
    "qwen2_5_vl": "Qwen2.5-VL",
    "mistral": "Mistral 7B",
    "mimo": "MiMo-7B",
    "qwen3": "Qwen3 0.6B to 32B",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B",
    "qwen3_vl": "Qwen3-VL, dense",
    "qwen3_vl_moe": "Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
    "qwen3_next": "Qwen3-Next-80B-A3B",
    "qwen3_5": "Qwen3.5 and Qwen3.6, dense",
    "qwen3_5_moe": "Qwen3.5 and Qwen3.6 with experts",
    "deepseek_v3": "DeepSeek-V3, R1, Moonlight",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4 Flash and Pro",
    "kimi_k2": "Kimi K2, K2-Thinking",
    "kimi_k25": "Kimi K2.5, K2.6",
    "glm4": "GLM-4",
    "glm4_moe": "GLM-4.5, 4.6, 4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm_moe_dsa": "GLM-5, GLM-5.1, 5.2, 5.3",
    "hy_v3": "Hunyuan 3",
    "minimax_m2": "MiniMax-M2, M2.5, M2.7",
    "solar_open": "Solar Open",
    "smollm3": "SmolLM3",
    "gpt_oss": "gpt-oss-20b, gpt-oss-120b",
    "nemotron_h": "Nemotron-3 Nano, Super and Ultra",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
}
"""model_type -> releases; spellings of the same family (`qwen3_5_text`) are left out."""


UNPROVEN: dict[str, str] = {
    "mimo": "transformers has no `mimo`: names are as SGLang loads them; the decoder and the layer "
    "within the MTP layer were compared with transformers' Qwen2",
    "kimi_k2": "transformers has no `kimi_k2`: names and shapes are DeepSeek-V3's, with whose "
    "implementation it was compared",
    "kimi_k25": "transformers has no `kimi_k25`: names are as SGLang loads them; the text model "
    "was compared with transformers' DeepSeek-V3",
}
"""model_type -> why its training is refused unless the recipe sets `model.allow_unproven`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Records what the tests of a family showed, on tiny models of its real architecture."""

    cases: tuple[str, ...]
    """Names of the tiny models."""
    logits: float | None
    """Largest difference between Megatron-Core's and transformers' logits in float32, relative to
    the largest logit; None: not compared."""
    logits_why: str
    """Why the logits were not compared; empty if they were."""
    layouts: tuple[str, ...]
    """Layouts under which every tensor came back bit for bit."""
    converted: bool
    """True if hf -> torch_dist -> hf gave the same bits, and stock dist_checkpointing could load
    the step between."""
    when: str
    """Day of the comparison, and versions of what was compared."""


def evidence() -> dict[str, Evidence]:
    """Return the evidence by family; a family without a record was not tested."""
    raw = read_json(Path(__file__).with_name("evidence.json"))
    return {
        family: Evidence(
            **{**record, "cases": tuple(record["cases"]), "layouts": tuple(record["layouts"])}
        )
        for family, record in raw.items()
    }
