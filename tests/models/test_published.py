"""The published config.json of real models: each is read, and counts the parameters that
transformers' own model has (text part, tied head once, without MTP layers and vision) and that its
vendor states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli import models
from milescli.models import costs

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "configs"
BILLIONS: dict[str, tuple[float, float | None]] = {
    "Qwen--Qwen2.5-0.5B-Instruct": (0.494, None),
    "Qwen--Qwen2.5-1.5B-Instruct": (1.544, None),
    "Qwen--Qwen2.5-3B-Instruct": (3.086, None),
    "Qwen--Qwen2.5-7B-Instruct": (7.62, None),
    "Qwen--Qwen2.5-32B-Instruct": (32.76, None),
    "Qwen--Qwen3-0.6B": (0.596, None),
    "Qwen--Qwen3-1.7B": (1.721, None),
    "Qwen--Qwen3-4B": (4.022, None),
    "Qwen--Qwen3-8B": (8.19, None),
    "Qwen--Qwen3-14B": (14.77, None),
    "Qwen--Qwen3-32B": (32.76, None),
    "Qwen--Qwen3-30B-A3B": (30.53, 3.35),
    "Qwen--Qwen3-235B-A22B": (235.09, 22.19),
    "Qwen--Qwen3-Next-80B-A3B-Instruct": (79.67, 3.88),
    "Qwen--Qwen3.5-4B": (4.21, None),
    "Qwen--Qwen3.5-9B": (8.95, None),
    "Qwen--Qwen3.5-27B": (26.90, None),
    "Qwen--Qwen3.5-35B-A3B": (34.66, 3.46),
    "Qwen--Qwen3.6-27B": (26.90, None),
    "Qwen--Qwen3.6-35B-A3B": (34.66, 3.46),
    "XiaomiMiMo--MiMo-7B-RL": (7.62, None),
    "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B": (7.62, None),
    "deepseek-ai--DeepSeek-R1": (671.03, 37.55),
    "deepseek-ai--DeepSeek-V3": (671.03, 37.55),
    "deepseek-ai--DeepSeek-V3.2": (671.88, 38.40),
    "deepseek-ai--DeepSeek-V4-Flash": (284.33, 13.80),
    "deepseek-ai--DeepSeek-V4-Pro": (1573.0, 49.78),
    "google--gemma-4-26B-A4B": (25.23, 3.82),
    "google--gemma-4-31B-it": (30.70, None),
    "meta-llama--Llama-3.1-8B": (8.03, None),
    "meta-llama--Llama-3.2-3B-Instruct": (3.21, None),
    "moonshotai--Kimi-K2-Instruct": (1026.4, 32.86),
    "moonshotai--Kimi-K2-Thinking": (1026.4, 32.86),
    "moonshotai--Kimi-K2.5": (1026.4, 32.86),
    "moonshotai--Kimi-K2.6": (1026.4, 32.86),
    "moonshotai--Moonlight-16B-A3B-Instruct": (15.96, 2.92),
    "nvidia--NVIDIA-Nemotron-3-Nano-4B-BF16": (3.973556832, None),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.58, 3.58),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (120.67, 12.77),
    "openai--gpt-oss-20b": (20.91, 4.19),
    "openai--gpt-oss-120b": (116.83, 5.71),
    "zai-org--GLM-4.5": (352.8, 33.63),
    "zai-org--GLM-4.5-Air": (106.85, 13.42),
    "zai-org--GLM-4.7-Flash": (29.94, 3.90),
    "zai-org--GLM-5": (743.9, 41.79),
    "zai-org--GLM-5.1": (743.9, 41.79),
}
"""Total and active parameters, in 1e9, rounded as written; counted on transformers 5.12.1's model
on the meta device."""


def _close(count: int, billions: float) -> bool:
    digits = len(f"{billions}".partition(".")[2])
    return abs(count / 1e9 - billions) <= 1.1 * 10**-digits


@pytest.mark.parametrize("name", BILLIONS)
def test_published_models_are_read_and_counted(name: str) -> None:
    file = CONFIGS / f"{name}.json"
    if not file.exists():
        pytest.skip("the published configs are not beside this repository")
    facts = models.parse_facts(json.loads(file.read_text()))
    table = models.table(facts)
    total, active = BILLIONS[name]
    assert _close(table.num_parameters, total), table.num_parameters / 1e9
    assert _close(table.num_active_parameters, active or total), table.num_active_parameters / 1e9
    flops = costs.token_flops(table)
    assert (
        0.8 * 2 * table.num_active_parameters < flops.matmul < 2.2 * table.num_active_parameters
        or facts.tied_embeddings
    )
    assert costs.cache_cost(facts).bytes_of(4096) > 0


def test_every_published_config_is_in_the_table() -> None:
    if not CONFIGS.exists():
        pytest.skip("the published configs are not beside this repository")
    assert {file.stem for file in CONFIGS.glob("*.json")} == set(BILLIONS)
