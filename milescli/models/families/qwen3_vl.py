"""Family Qwen3-VL, dense and with experts: the decoder of Qwen3 with interleaved multimodal rotary
positions, after a vision tower whose inner layers are added to the decoder's first layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from milescli.core.errors import CheckpointError
from milescli.models import fields, hybrid, layers, vision
from milescli.models.base import Rule, WeightTable
from milescli.models.facts import ModelFacts
from milescli.models.families import qwen3, qwen3_moe
from milescli.models.transforms import join, shapes, split_halves

if TYPE_CHECKING:
    from torch import Tensor

_TEXT = {"qwen3_vl": qwen3, "qwen3_vl_moe": qwen3_moe}
_NAMES = "model.language_model."


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `qwen3_vl` or `qwen3_vl_moe` config. Raises CheckpointError for
    what the trainer cannot compute."""
    family, text = str(config.get("model_type")), hybrid.text_config(config)
    fields.refuse(text, "norm_topk_prob", unless=True, why="transformers always normalises")
    decoder = {"max_position_embeddings": 128_000, **text, "norm_topk_prob": True}
    model = _TEXT[family].facts(vision.text_rope_config(decoder))
    if model.num_experts and model.hidden_size in (
        model.moe_ffn_hidden_size,
        2 * model.moe_ffn_hidden_size,
    ):
        raise CheckpointError(
            "experts of this Qwen3-VL model have square matrices",
            why=f"hidden_size is {model.hidden_size} and moe_intermediate_size is "
            f"{model.moe_ffn_hidden_size}: releases and transformers store experts in "
            "opposite orientations, and a square matrix does not show which one it has",
            fix="use a model whose hidden_size is neither moe_intermediate_size nor twice that",
        )
    return replace(
        model,
        family=family,
        rope=vision.multimodal_rope(
            model.rope,
            text,
            head_dim=model.head_dim,
            interleaved=True,
            default=(24, 20, 20),
        ),
        vision=vision.vision(config, tower="qwen3_vl", hidden_size=model.hidden_size),
        multimodal=True,
    )


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    assert facts.vision is not None
    plain = _TEXT[facts.family].table(facts)
    rules = tuple(_RELEASED.get(rule.megatron, rule) for rule in plain.rules)
    tower = vision.rules(facts.vision, hf="model.visual.")
    return replace(plain, rules=(*tower, *layers.prefixed(rules, _NAMES)))


def _transpose(tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Transpose the tensors: [input, output] <-> [output, input]."""
    return [tensor.mT for tensor in tensors]


def _transpose_and_split(tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Split [hidden_size, 2 * width] into gate and up, [width, hidden_size] each."""
    return split_halves(_transpose(tensors, facts), facts)


def _join_and_transpose(parts: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Join gate and up, and transpose; inverts `_transpose_and_split`."""
    return [join(parts, dim=0).mT]


def _released(rule: Rule) -> Rule:
    """Return the rule of experts in the form of releases and engines, [experts, input, output]. Its
    alternatives: transformers writes [experts, output, input] under the same names, and quantised
    releases store each expert separately."""
    (stacked,) = (form for form in rule.alternatives if form.stacked)
    is_up = len(rule.hf) == 2
    turned = replace(
        stacked,
        shapes=shapes(
            (lambda f: (f.hidden_size, 2 * f.moe_ffn_hidden_size))
            if is_up
            else (lambda f: (f.moe_ffn_hidden_size, f.hidden_size))
        ),
        unpack=_transpose_and_split if is_up else _transpose,
        pack=_join_and_transpose if is_up else _transpose,
    )
    return replace(turned, alternatives=(stacked, replace(rule, alternatives=())))


_RELEASED = {rule.megatron: _released(rule) for rule in (layers.EXPERT_UP, layers.EXPERT_DOWN)}
