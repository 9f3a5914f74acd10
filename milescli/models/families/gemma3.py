"""Family Gemma 3: windows in most layers, with their own rotary embedding; zero-centered norms
before and after each part; scaled embeddings. The text model alone, or within a multimodal release,
whose vision tower is passed through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.models import fields, hybrid, layers, vision
from milescli.models.base import Rule, WeightTable
from milescli.models.facts import Layer, Mixer, ModelFacts, Rope
from milescli.models.families import llama

_NESTED = "language_model."
"""Prefix of the text model's names in a multimodal release."""
_TOWERS = (r"^(model\.)?vision_tower\.", r"^(model\.)?multi_modal_projector\.")
_UNUSED = (r"^(model\.)?vision_tower\.(vision_model\.)?head\.",)
"""Patterns of tensors that a SigLIP tower has for its own training; the decoder does not use them.
"""
_CHECKED = "releases of this family have it so, and nothing else was checked"

_SIZES = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
"""transformers' defaults for fields that a Gemma 3 config omits."""

POST_ATTENTION = layers.norm("post_attention_layernorm.weight", "post_self_attn_layernorm.weight")
MLP_NORM = layers.norm("pre_feedforward_layernorm.weight", "pre_mlp_layernorm.weight")
POST_MLP = layers.norm("post_feedforward_layernorm.weight", "post_mlp_layernorm.weight")


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `gemma3` or `gemma3_text` config. Raises CheckpointError for what
    the trainer cannot compute."""
    text = hybrid.text_config(config)
    multimodal = text is not config
    plain = text_facts(text, family="gemma3")
    fields.refuse(
        text, "use_bidirectional_attention", unless=False, why="the trainer's attention is causal"
    )
    fields.refuse(text, "attn_logit_softcapping", unless=None, why="transformers ignores it")
    if multimodal and plain.logit_softcap is not None:
        raise fields.unusable_field(
            "final_logit_softcapping",
            why="transformers only caps the logits of this family in the stand-alone text model",
            fix="use a release without it",
        )
    rope, rope_sliding = _ropes({**_SIZES, **text})
    return replace(
        plain,
        layers=tuple(Layer(mixer=mixer) for mixer in _mixers(text, num_layers=plain.num_layers)),
        norm_zero_centered=True,
        rope=rope,
        rope_sliding=rope_sliding,
        attention_scale=fields.number(text, "query_pre_attn_scalar", default=256.0, kind=float)
        ** -0.5,
        eos_token_ids=fields.eos_token_ids(config) or plain.eos_token_ids,
        multimodal=multimodal,
        vision=vision.siglip(config, hidden_size=plain.hidden_size)
        if multimodal and "vision_config" in config
        else None,
    )


def text_facts(config: Mapping[str, object], *, family: str) -> ModelFacts:
    """Parse the facts that all Gemmas share from a text config, with transformers' defaults for
    missing sizes. Raises CheckpointError."""
    fields.refuse(config, "attention_bias", unless=False, why=_CHECKED)
    for name in ("hidden_activation", "hidden_act"):
        fields.refuse(config, name, unless="gelu_pytorch_tanh", why=_CHECKED)
    read = {
        **_SIZES,
        **{name: value for name, value in config.items() if value is not None},
        "hidden_act": "silu",
    }
    return llama.plain_facts(
        read,
        family=family,
        rope=None,
        qk_norm=True,
        sandwich_norms=True,
        activation="gelu_tanh",
        sliding_window=fields.number(read, "sliding_window", kind=int),
        embedding_scale=fields.number(read, "hidden_size", kind=int) ** 0.5,
        logit_softcap=fields.number(read, "final_logit_softcapping", kind=float)
        if "final_logit_softcapping" in read
        else None,
    )


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    rules = (
        *llama.outside(facts),
        *llama.attention(facts),
        POST_ATTENTION,
        MLP_NORM,
        layers.MLP_UP,
        layers.MLP_DOWN,
        POST_MLP,
    )
    if facts.multimodal:
        rules = _as_released(rules)
    if facts.vision is None:  # a config that does not describe its tower: past the trainer with it
        return WeightTable(facts=facts, rules=rules, passthrough=_TOWERS)
    tower = vision.siglip_rules(facts.vision)
    return WeightTable(facts=facts, rules=(*tower, *rules), passthrough=_UNUSED)


def _as_released(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules with the names of multimodal releases, and as an alternative with those that
    transformers has in memory."""
    in_memory = layers.prefixed(rules, "model.language_model.")
    return tuple(
        replace(rule, hf=tuple(_NESTED + name for name in rule.hf), alternatives=(other,))
        for rule, other in zip(rules, in_memory, strict=True)
    )


def _mixers(config: Mapping[str, object], *, num_layers: int) -> tuple[Mixer, ...]:
    length = fields.number(config, "sliding_window_pattern", default=6, kind=int)
    if length < 1:
        raise fields.unusable_field(
            "sliding_window_pattern",
            why=f"the layers do not come in groups of {length}",
        )
    sliding: tuple[Mixer, ...] = ("sliding",)
    return fields.mixers(config, num_layers=num_layers, period=(*sliding * (length - 1), "full"))


def _ropes(config: Mapping[str, object]) -> tuple[Rope, Rope]:
    """Return the rotary embeddings of full and of sliding layers. Old configs hold that of full
    layers in the usual fields, and only a base for that of sliding layers."""
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and any(isinstance(value, Mapping) for value in nested.values()):
        by_kind = {"full_attention": {}, "sliding_attention": {}, **nested}
        named = {
            **config,
            "rope_parameters": {
                name: values or {"rope_type": "default"} for name, values in by_kind.items()
            },
        }
        return (
            fields.rope(named, layer_type="full_attention", theta=1e6),
            fields.rope(named, layer_type="sliding_attention", theta=1e4),
        )
    return fields.rope(config, theta=1e6), Rope(
        theta=fields.number(config, "rope_local_base_freq", default=1e4, kind=float)
    )
