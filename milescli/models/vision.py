"""Describes vision-language models: facts of the towers of the Qwen line and of Gemma 3, and of
multimodal rotary positions, and the rules of a tower's weights. The decoder is that of a text
family; the family files combine the two."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from milescli.core.errors import CheckpointError
from milescli.models import fields
from milescli.models.base import VISION_PREFIX, Rule
from milescli.models.facts import ModelFacts, Rope, Vision
from milescli.models.tensor_rules import tensor_rule

_ROPES = ("rope_parameters", "rope_scaling")
_SIGLIP_TYPE = "siglip_vision_model"
_SIZES: Mapping[str, Mapping[str, int]] = {
    "qwen2_5_vl": {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14},
    "qwen3_vl": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16},
}
"""transformers' defaults for fields that a `vision_config` omits."""


def with_vision(facts: ModelFacts, trained: Literal["frozen", "projector", "all"]) -> ModelFacts:
    """Return the facts of a model whose tower is trained according to `model.vision`. Raises
    CheckpointError if the model has no tower that can be trained."""
    if facts.vision is not None:
        return replace(facts, vision=replace(facts.vision, trained=trained))
    if trained == "frozen":
        return facts
    raise CheckpointError(
        f"a `{facts.family}` model has no vision tower that could be trained",
        why=f"`model.vision` is {trained}; miles can train the towers of gemma3, qwen2_5_vl, "
        "qwen3_vl and qwen3_vl_moe"
        + (
            ", and the tower of this release is passed through unchanged"
            if facts.multimodal
            else ""
        ),
        fix=["--set model.vision=frozen", "--set model.path=Qwen/Qwen2.5-VL-7B-Instruct"],
    )


def text_rope_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return a text config whose rotary embedding is written as in the text family: `type: mrope`,
    beside which transformers writes `rope_type: default`, counts as that kind too."""
    plain = dict(config)
    for name in _ROPES:
        nested = config.get(name)
        if isinstance(nested, Mapping):
            kinds = {key: nested[key] for key in ("rope_type", "type") if nested.get(key)}
            others = [kind for kind in kinds.values() if kind not in ("mrope", "default")]
            kind = others[0] if others else "default"
            plain[name] = {**nested, **dict.fromkeys(kinds, kind)}
    return plain


def multimodal_rope(
    rope: Rope | None,
    config: Mapping[str, object],
    *,
    head_dim: int,
    interleaved: bool,
    default: tuple[int, int, int] | None = None,
) -> Rope:
    """Return a text model's rotary embedding with the sections of its config. Raises
    CheckpointError if they are missing, or do not add up to the angles of a head."""
    assert rope is not None, "these families rotate"
    objects = [nested for name in _ROPES if isinstance(nested := config.get(name), Mapping)]
    named = [nested["mrope_section"] for nested in objects if nested.get("mrope_section")]
    sections = named[0] if named else default
    if not isinstance(sections, list | tuple) or len(sections) != 3:
        raise fields.unusable_field(
            "mrope_section", why=f"it must be three numbers of angles, not {sections!r}"
        )
    if any(other != sections for other in named) or sum(sections) != head_dim // 2:
        raise fields.unusable_field(
            "mrope_section",
            why=f"the sections {sections} do not add up to the {head_dim // 2} angles of a head "
            f"of {head_dim}",
        )
    if any(nested.get("mrope_interleaved") is (not interleaved) for nested in objects):
        raise fields.unusable_field(
            "mrope_interleaved",
            why=f"transformers always uses {interleaved} for this family",
        )
    time, row, column = (int(length) for length in sections)
    return replace(rope, sections=(time, row, column), sections_interleaved=interleaved)


def vision(
    config: Mapping[str, object], *, tower: Literal["qwen2_5_vl", "qwen3_vl"], hidden_size: int
) -> Vision:
    """Parse the tower from a multimodal config. Raises CheckpointError for sizes that do not fit
    the decoder."""
    given = config.get("vision_config")
    if not isinstance(given, Mapping):
        raise fields.unusable_field("vision_config", why=f"it must be an object, not {given!r}")
    sizes = {**_SIZES[tower], **{key: value for key, value in given.items() if value is not None}}
    deepstack = tuple(sizes.get("deepstack_visual_indexes", (8, 16, 24)))  # type: ignore[arg-type]
    out = fields.number(sizes, "out_hidden_size", default=3584, kind=int)
    if out != hidden_size:
        raise fields.unusable_field(
            "out_hidden_size",
            why=f"the tower returns {out} numbers per token, but the decoder expects {hidden_size}",
        )
    patch = fields.number(sizes, "patch_size", kind=int)
    return Vision(
        tower=tower,
        config=json.dumps(dict(given), sort_keys=True),
        depth=fields.number(sizes, "depth", kind=int),
        hidden_size=fields.number(sizes, "hidden_size", kind=int),
        ffn_hidden_size=fields.number(sizes, "intermediate_size", kind=int),
        out_hidden_size=out,
        patch_shape=(
            fields.number(sizes, "in_channels", default=3, kind=int),
            fields.number(sizes, "temporal_patch_size", default=2, kind=int),
            patch,
            patch,
        ),
        merge_size=fields.number(sizes, "spatial_merge_size", default=2, kind=int),
        num_positions=fields.number(sizes, "num_position_embeddings", default=2304, kind=int)
        if tower == "qwen3_vl"
        else 0,
        deepstack=deepstack if tower == "qwen3_vl" else (),
        image_token_id=fields.number(config, "image_token_id", default=151_655, kind=int),
    )


_SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
}
"""transformers' defaults for fields that a `vision_config` of `siglip_vision_model` omits."""


def siglip(config: Mapping[str, object], *, hidden_size: int) -> Vision:
    """Parse Gemma 3's tower and projector from a multimodal config. Every image is resized to a
    square of fixed size, so all give the same number of tokens. Raises CheckpointError for sizes
    that do not divide into whole tokens."""
    given = config.get("vision_config")
    if not isinstance(given, Mapping) or given.get("model_type", _SIGLIP_TYPE) != _SIGLIP_TYPE:
        raise fields.unusable_field("vision_config", why=f"it must be `{_SIGLIP_TYPE}`")
    sizes = {**_SIGLIP, **{key: value for key, value in given.items() if value is not None}}
    side, patch = (fields.number(sizes, name, kind=int) for name in ("image_size", "patch_size"))
    tokens = fields.number(config, "mm_tokens_per_image", default=256, kind=int)
    rows, of_tokens = side // patch, math.isqrt(tokens)
    if side % patch or of_tokens**2 != tokens or not tokens or rows % of_tokens:
        raise fields.unusable_field(
            "mm_tokens_per_image",
            why=f"{rows} x {rows} patches of an image of {side} pixels do not form {tokens} "
            "tokens in a square",
        )
    token = fields.number(
        config,
        "image_token_id" if "image_token_id" in config else "image_token_index",
        default=262_144,
        kind=int,
    )
    return Vision(
        tower="siglip",
        config=json.dumps(dict(given), sort_keys=True),
        depth=fields.number(sizes, "num_hidden_layers", kind=int),
        hidden_size=fields.number(sizes, "hidden_size", kind=int),
        ffn_hidden_size=fields.number(sizes, "intermediate_size", kind=int),
        out_hidden_size=hidden_size,
        patch_shape=(fields.number(sizes, "num_channels", kind=int), 1, patch, patch),
        merge_size=rows // of_tokens,
        num_positions=rows**2,
        image_token_id=token,
        mutual=True,
    )


def siglip_rules(vision: Vision) -> tuple[Rule, ...]:
    """Return the rules of Gemma 3's tower and projector, with the names in releases; alternatives
    are the names that transformers writes and those that it has in memory."""
    made = []
    for rule in rules(vision, hf=""):
        written = rule.hf[0]
        released = written.replace("vision_tower.", "vision_tower.vision_model.", 1)
        others = dict.fromkeys((written, f"model.{written}", f"model.{released}"))
        forms = tuple(replace(rule, hf=(name,)) for name in others if name != released)
        made.append(replace(rule, hf=(released,), alternatives=forms))
    return tuple(made)


def rules(vision: Vision, *, hf: str) -> tuple[Rule, ...]:
    """Return the rules of the tower's weights, in its own order; `hf` is the prefix of their names
    on disk. Every tensor-parallel rank holds all of them."""
    return tuple(
        replace(
            tensor_rule(hf + name, VISION_PREFIX + name, block="outside"),
            shapes=lambda facts, shape=shape: [shape],
        )
        for name, shape in _TENSORS[vision.tower](vision)
    )


Shape = tuple[int, ...]
Tensors = Iterator[tuple[str, Shape]]


def _linear(name: str, rows: int, columns: int) -> Tensors:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _norm(name: str, size: int) -> Tensors:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def _of_qwen2_5(vision: Vision) -> Tensors:
    size, wide = vision.hidden_size, vision.ffn_hidden_size
    merged = size * vision.merge_size**2
    yield "patch_embed.proj.weight", (size, *vision.patch_shape)
    for number in range(vision.depth):
        block = f"blocks.{number}."
        yield block + "norm1.weight", (size,)
        yield block + "norm2.weight", (size,)
        yield from _linear(block + "attn.qkv", 3 * size, size)
        yield from _linear(block + "attn.proj", size, size)
        yield from _linear(block + "mlp.gate_proj", wide, size)
        yield from _linear(block + "mlp.up_proj", wide, size)
        yield from _linear(block + "mlp.down_proj", size, wide)
    yield "merger.ln_q.weight", (size,)
    yield from _linear("merger.mlp.0", merged, merged)
    yield from _linear("merger.mlp.2", vision.out_hidden_size, merged)


def _of_qwen3(vision: Vision) -> Tensors:
    size, wide = vision.hidden_size, vision.ffn_hidden_size
    merged = size * vision.merge_size**2
    yield "patch_embed.proj.weight", (size, *vision.patch_shape)
    yield "patch_embed.proj.bias", (size,)
    yield "pos_embed.weight", (vision.num_positions, size)
    for number in range(vision.depth):
        block = f"blocks.{number}."
        yield from _norm(block + "norm1", size)
        yield from _norm(block + "norm2", size)
        yield from _linear(block + "attn.qkv", 3 * size, size)
        yield from _linear(block + "attn.proj", size, size)
        yield from _linear(block + "mlp.linear_fc1", wide, size)
        yield from _linear(block + "mlp.linear_fc2", size, wide)
    deep = [f"deepstack_merger_list.{number}." for number in range(len(vision.deepstack))]
    for merger, normed in (("merger.", size), *((prefix, merged) for prefix in deep)):
        yield from _norm(merger + "norm", normed)
        yield from _linear(merger + "linear_fc1", merged, merged)
        yield from _linear(merger + "linear_fc2", vision.out_hidden_size, merged)


def _of_siglip(vision: Vision) -> Tensors:
    size, wide, (channels, _, patch, _) = (
        vision.hidden_size,
        vision.ffn_hidden_size,
        vision.patch_shape,
    )
    tower = "vision_tower."
    yield tower + "embeddings.patch_embedding.weight", (size, channels, patch, patch)
    yield tower + "embeddings.patch_embedding.bias", (size,)
    yield tower + "embeddings.position_embedding.weight", (vision.num_positions, size)
    for number in range(vision.depth):
        block = f"{tower}encoder.layers.{number}."
        yield from _norm(block + "layer_norm1", size)
        yield from _norm(block + "layer_norm2", size)
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from _linear(f"{block}self_attn.{name}", size, size)
        yield from _linear(block + "mlp.fc1", wide, size)
        yield from _linear(block + "mlp.fc2", size, wide)
    yield from _norm(tower + "post_layernorm", size)
    projector = "multi_modal_projector."
    yield projector + "mm_input_projection_weight", (size, vision.out_hidden_size)
    yield projector + "mm_soft_emb_norm.weight", (size,)


_TENSORS: Mapping[str, Callable[[Vision], Tensors]] = {
    "qwen2_5_vl": _of_qwen2_5,
    "qwen3_vl": _of_qwen3,
    "siglip": _of_siglip,
}
