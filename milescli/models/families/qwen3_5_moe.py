"""Family Qwen3.5 and Qwen3.6 with experts: Qwen3.5 whose layers have routed experts and a gated
shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.models import gated_delta, hybrid, layers
from milescli.models.base import Rule, WeightTable
from milescli.models.facts import ModelFacts


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `qwen3_5_moe` or `qwen3_5_moe_text` config. Raises CheckpointError
    for what the trainer cannot compute."""
    text = hybrid.text_config(config)
    plain = replace(hybrid.facts(text, family="qwen3_5_moe"), ffn_hidden_size=0)
    # transformers scales the chosen experts' weights to sum to 1 whatever the config says
    return hybrid.nested(hybrid.with_experts(plain, text, normalize_topk=True), config)


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight. Releases store a layer's experts as one tensor;
    transformers saves them one by one."""
    experts = tuple(_stacked_first(rule) for rule in (layers.EXPERT_UP, layers.EXPERT_DOWN))
    plain = hybrid.table(facts, in_proj=gated_delta.SEPARATE_IN_PROJ, experts=experts)
    return replace(plain, rules=hybrid.either_prefix(facts, plain.rules), passthrough=hybrid.VISION)


def _stacked_first(rule: Rule) -> Rule:
    (stacked,) = (form for form in rule.alternatives if form.stacked)
    return replace(stacked, alternatives=(replace(rule, alternatives=()),))
