"""Makes rules for tensors that Hugging Face and Megatron store alike except for names and cuts, and
computes the lengths of their dims. Shared layers and families build their tables with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milescli.models.base import REPLICATED, Rule, Sharding
from milescli.models.facts import ModelFacts
from milescli.models.transforms import as_list, concatenate, halve, identity

Size = Callable[[ModelFacts], int]
"""Facts -> the length of a dim."""


def tensor_rule(
    hf: str | tuple[str, str],
    megatron: str,
    *dims: Size,
    sharding: Sharding = REPLICATED,
    **others: Any,
) -> Rule:
    """Return the rule of a tensor with the lengths `dims` that is also one tensor in Megatron. With
    two names `hf`, each tensor has these lengths, and Megatron holds them concatenated in this
    order. `others` are further fields of the rule."""
    names = (hf,) if isinstance(hf, str) else hf
    is_single = len(names) == 1
    return Rule(
        hf=names,
        megatron=megatron,
        shapes=lambda facts: [tuple(dim(facts) for dim in dims)] * len(names),
        sharding=sharding,
        fuse=identity if is_single else concatenate,
        split=as_list if is_single else halve,
        **others,
    )


def hidden(facts: ModelFacts) -> int:
    """Return hidden_size."""
    return facts.hidden_size


def vocabulary(facts: ModelFacts) -> int:
    """Return vocab_size."""
    return facts.vocab_size


def queries(facts: ModelFacts) -> int:
    """Return the length of all query heads together."""
    return facts.num_heads * facts.head_dim


def ffn(facts: ModelFacts) -> int:
    """Return the width of an MLP."""
    return facts.ffn_hidden_size


def expert_ffn(facts: ModelFacts) -> int:
    """Return the width of an expert."""
    return facts.moe_ffn_hidden_size


def shared_ffn(facts: ModelFacts) -> int:
    """Return the width of the experts that every token uses, together."""
    return facts.shared_expert_ffn_hidden_size


def num_experts(facts: ModelFacts) -> int:
    """Return num_experts."""
    return facts.num_experts
