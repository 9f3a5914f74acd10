"""Family Kimi K2 (`kimi_k2`), and the text tower of K2.5 and K2.6 (`kimi_k25`): DeepSeek-V3's
architecture in Kimi's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.models import fields, latent
from milescli.models.base import Rule, WeightTable
from milescli.models.facts import ModelFacts
from milescli.models.families import deepseek_v3

_TOWERS = (r"^vision_tower\.", r"^mm_projector\.")


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `kimi_k2` or `kimi_k25` config. Raises CheckpointError for what the
    trainer cannot compute."""
    if config.get("model_type") != "kimi_k25":
        return replace(deepseek_v3.facts(config), family="kimi_k2")
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise fields.unusable_field(
            "text_config",
            why=f"a multimodal Kimi must describe its text model there, but it is {text!r}",
            fix="download the model again",
        )
    model = deepseek_v3.facts(text)
    return replace(
        model,
        family="kimi_k25",
        multimodal=True,
        dtype=fields.dtype(text)
        if "dtype" in text or "torch_dtype" in text
        else fields.dtype(config),
        eos_token_ids=model.eos_token_ids or fields.eos_token_ids(config),
    )


def table(facts: ModelFacts) -> WeightTable:
    """Map every weight of the text model; vision tower and projector are passed through."""
    plain = latent.table(facts)
    return (
        replace(plain, rules=_nested(plain.rules), passthrough=_TOWERS)
        if facts.multimodal
        else plain
    )


def _nested(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules with all names within `language_model`, including that of the output
    layer."""
    return tuple(
        replace(
            rule,
            hf=tuple("language_model." + name for name in rule.hf),
            alternatives=_nested(rule.alternatives),
        )
        for rule in rules
    )
