"""Defines what a model is: `load_facts` reads config.json, `table` returns the two-way weight
table. One file per family; no torch at import."""

from __future__ import annotations

import importlib
import traceback
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from milescli.core.errors import CheckpointError, nearest
from milescli.models.base import Entry, Rule, Sharding, WeightTable, read_config
from milescli.models.facts import ModelFacts
from milescli.models.mtp import with_shared_ends
from milescli.models.score_head import scores, with_score_head, with_score_rule

__all__ = [
    "FAMILIES",
    "Entry",
    "ModelFacts",
    "Rule",
    "Sharding",
    "WeightTable",
    "load_facts",
    "parse_facts",
    "table",
]

FAMILIES: dict[str, str] = {
    "deepseek_v3": "milescli.models.families.deepseek_v3",
    "deepseek_v32": "milescli.models.families.deepseek_v32",
    "deepseek_v4": "milescli.models.families.deepseek_v4",
    "gemma3": "milescli.models.families.gemma3",
    "gemma3_text": "milescli.models.families.gemma3",
    "gemma4": "milescli.models.families.gemma4",
    "gemma4_text": "milescli.models.families.gemma4",
    "glm4": "milescli.models.families.glm4",
    "glm4_moe": "milescli.models.families.glm4_moe",
    "glm4_moe_lite": "milescli.models.families.glm4_moe_lite",
    "glm_moe_dsa": "milescli.models.families.glm_moe_dsa",
    "gpt_oss": "milescli.models.families.gpt_oss",
    "hy_v3": "milescli.models.families.hy_v3",
    "kimi_k2": "milescli.models.families.kimi",
    "kimi_k25": "milescli.models.families.kimi",
    "llama": "milescli.models.families.llama",
    "mimo": "milescli.models.families.mimo",
    "minimax_m2": "milescli.models.families.minimax_m2",
    "mistral": "milescli.models.families.mistral",
    "nemotron_h": "milescli.models.families.nemotron_h",
    "qwen2": "milescli.models.families.qwen2",
    "qwen2_5_vl": "milescli.models.families.qwen2_5_vl",
    "qwen3": "milescli.models.families.qwen3",
    "qwen3_5": "milescli.models.families.qwen3_5",
    "qwen3_5_moe": "milescli.models.families.qwen3_5_moe",
    "qwen3_5_moe_text": "milescli.models.families.qwen3_5_moe",
    "qwen3_5_text": "milescli.models.families.qwen3_5",
    "qwen3_moe": "milescli.models.families.qwen3_moe",
    "qwen3_next": "milescli.models.families.qwen3_next",
    "qwen3_vl": "milescli.models.families.qwen3_vl",
    "qwen3_vl_moe": "milescli.models.families.qwen3_vl",
    "smollm3": "milescli.models.families.smollm3",
    "solar_open": "milescli.models.families.solar_open",
}
"""model_type of config.json -> module with `facts(config)` and `table(facts)`."""


def load_facts(folder: Path | str) -> ModelFacts:
    """Read the facts of a model from its Hugging Face folder. Raises CheckpointError for a folder
    or a family that is not usable."""
    return parse_facts(read_config(Path(folder)))


def parse_facts(config: dict[str, object]) -> ModelFacts:
    """Return the facts of a parsed config.json. Raises CheckpointError as `load_facts` does."""
    family = _family(str(config.get("model_type")))
    try:
        facts = family.facts(config)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
        # whatever the family's file does not refuse by name: a size of 0, a text for a list
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise CheckpointError(
            f"config.json is not supported: `{config.get('model_type')}` cannot be read from it",
            why=f"{type(error).__name__}: {error}, at `{line.line}`",
            fix="compare its fields with those of the model's release",
        ) from error
    return with_score_head(facts) if scores(config) else facts


@lru_cache(maxsize=4)
def table(facts: ModelFacts) -> WeightTable:
    """Return the two-way weight table of a model. Remembers the last ones with what they have
    counted, since a plan asks for the same tables over and over."""
    of_family = _family(facts.family).table(facts)
    if facts.trains_mtp:
        return with_shared_ends(of_family)
    return with_score_rule(of_family) if facts.scores else of_family


def _family(model_type: str) -> ModuleType:
    if model_type not in FAMILIES:
        guess = nearest(model_type, FAMILIES)
        raise CheckpointError(
            f"models of type `{model_type}` are not supported",
            why=f"miles supports {', '.join(sorted(FAMILIES))}"
            + (f"; the nearest is `{guess}`" if guess else ""),
            fix="set `model.path` to a model of one of these families",
        )
    return importlib.import_module(FAMILIES[model_type])
