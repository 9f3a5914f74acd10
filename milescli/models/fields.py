"""Reads fields of a config.json, and refuses wrong ones by name. Used by the family files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar, cast

from milescli.core.errors import CheckpointError
from milescli.models.facts import Mixer, Rope, RopeScaling

Value = TypeVar("Value", int, float, bool)


def number(
    config: Mapping[str, object], *names: str, default: Value | None = None, kind: type[Value]
) -> Value:
    """Return the first of `names` that the config has, as `kind`. Raises CheckpointError if none is
    present and there is no default."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) is not (kind is bool) or not isinstance(value, int | float):
            raise unusable_field(names[0], why=f"`{name}` is {value!r}, not a {kind.__name__}")
        return kind(value)
    if default is None:
        raise unusable_field(names[0], why=f"config.json has no `{'` or `'.join(names)}`")
    return default


_SCALINGS = ("linear", "llama3", "yarn")
_ROPE_TOP_LEVEL = ("rope_theta", "original_max_position_embeddings")
"""Fields of a rotary embedding that old configs store outside its object."""
_SHARE = "partial_rotary_factor"


def rope(
    config: Mapping[str, object],
    *,
    layer_type: str | None = None,
    theta: float = 10_000.0,
    share: float | None = None,
    default_share: float = 1.0,
    interleaved: bool = False,
) -> Rope:
    """Parse the rotary embedding from `rope_parameters` (transformers 5), or from `rope_scaling`,
    `rope_theta` and `partial_rotary_factor`.

    `layer_type` selects an object if `rope_parameters` has one per type of layer (`full_attention`,
    `sliding_attention`). `theta` and `default_share` are the family's defaults. `share` overrides
    `partial_rotary_factor` if the family fixes it. Raises CheckpointError for contradicting fields,
    and for kinds that the trainer does not compute.
    """
    nested = _rope_object(config, layer_type=layer_type)
    kind = nested.get("rope_type") or "default"
    proportional = kind == "proportional"
    if kind not in ("default", "proportional", *_SCALINGS):
        raise CheckpointError(
            f"rotary embeddings of kind `{kind}` are not supported",
            why=f"the trainer supports default, {', '.join(_SCALINGS)} and proportional; with "
            "another kind, its positions would differ from the engine's",
            fix='set "rope_type": "default" in config.json if prompts and responses stay within '
            "the original context length",
        )
    if proportional and nested.get("factor") not in (None, 1, 1.0):
        raise unusable_field(
            "factor",
            why=f"it is {nested['factor']!r} in a rotary embedding of kind `proportional`",
        )
    both = {
        name: _agreed_value(name, nested.get(name), None if layer_type else config.get(name))
        for name in _ROPE_TOP_LEVEL
    }
    given = nested.get(_SHARE)
    # transformers writes the family's own default beside another share that counts
    if given is None or config.get(_SHARE) != default_share:
        given = _agreed_value(_SHARE, given, config.get(_SHARE))
    return Rope(
        theta=number(both, "rope_theta", default=theta, kind=float),
        share=share
        if share is not None
        else number({_SHARE: given}, _SHARE, default=default_share, kind=float),
        interleaved=interleaved,
        proportional=proportional,
        scaling=_rope_scaling({**nested, **both}, str(kind), config) if kind in _SCALINGS else None,
    )


def _rope_object(config: Mapping[str, object], *, layer_type: str | None) -> Mapping[str, object]:
    """Return the parameters of a rotary embedding, with `rope_type`; empty if there are none. A
    config may have both objects if they do not contradict each other."""
    objects = []
    for name in ("rope_parameters", "rope_scaling"):
        nested = config.get(name) or {}
        if isinstance(nested, Mapping) and any(
            isinstance(value, Mapping) for value in nested.values()
        ):
            if layer_type not in nested:
                wrong = f"none for `{layer_type}`" if layer_type else "this family has one for all"
                raise unusable_field(
                    name,
                    why=f"it needs one object for each of {', '.join(nested)}, but has {wrong}",
                )
            nested = nested[layer_type]
        if not isinstance(nested, Mapping):
            raise unusable_field(name, why=f"it must be an object, not {nested!r}")
        if nested:
            kind = (
                _agreed_value("rope_type", nested.get("rope_type"), nested.get("type")) or "default"
            )
            objects.append({**nested, "rope_type": kind})
    if len(objects) < 2:
        return objects[0] if objects else {}
    new, old = objects
    return {
        name: _agreed_value(name, new.get(name), old.get(name))
        for name in {**new, **old}
        if name != "type"
    }


def _rope_scaling(
    nested: Mapping[str, object], kind: str, config: Mapping[str, object]
) -> RopeScaling:
    longest = number(config, "max_position_embeddings", default=0, kind=int)
    original = number(nested, "original_max_position_embeddings", default=longest, kind=int)
    if kind != "linear" and original <= 0:
        raise unusable_field("original_max_position_embeddings", why=f"`{kind}` needs it")
    # YaRN alone may leave it to the lengths
    factor = number(
        nested, "factor", default=longest / original if kind == "yarn" else None, kind=float
    )
    if factor <= 0:
        raise unusable_field("factor", why=f"positions cannot be stretched by {factor}")
    return RopeScaling(
        kind=cast(Literal["linear", "llama3", "yarn"], kind),
        factor=factor,
        original_max_positions=original,
        low_freq_factor=number(
            nested, "low_freq_factor", default=None if kind == "llama3" else 1.0, kind=float
        ),
        high_freq_factor=number(
            nested, "high_freq_factor", default=None if kind == "llama3" else 4.0, kind=float
        ),
        # 0 means "as usual" too
        beta_fast=number(nested, "beta_fast", default=32.0, kind=float) or 32.0,
        beta_slow=number(nested, "beta_slow", default=1.0, kind=float) or 1.0,
        mscale=number(nested, "mscale", default=0.0, kind=float) or None,
        mscale_all_dim=number(nested, "mscale_all_dim", default=0.0, kind=float) or None,
        attention_factor=None
        if nested.get("attention_factor") is None
        else number(nested, "attention_factor", kind=float),
        truncate=number(nested, "truncate", default=True, kind=bool),
    )


def _agreed_value(name: str, first: object, second: object) -> object:
    """Return the value that one of two places gives, or that both agree on. Raises CheckpointError
    if they differ."""
    if first is not None and second is not None and first != second:
        raise CheckpointError(
            f"config.json contradicts itself: `{name}`",
            why=f"it is {first!r} in one place and {second!r} in another, and miles cannot know "
            "which one the weights were trained with",
            fix="remove the wrong one from config.json",
        )
    return first if first is not None else second


def mixers(
    config: Mapping[str, object], *, num_layers: int, period: tuple[Mixer, ...]
) -> tuple[Mixer, ...]:
    """Return [num_layers] full or sliding, from `layer_types`; if the config has none, repeat
    `period`. Raises CheckpointError for layer types of other families, and for another number of
    layers."""
    words = config.get("layer_types")
    if words is None:
        return tuple(period[layer % len(period)] for layer in range(num_layers))
    known: dict[object, Mixer] = {"full_attention": "full", "sliding_attention": "sliding"}
    if not isinstance(words, list) or len(words) != num_layers:
        raise unusable_field(
            "layer_types", why=f"{num_layers} layers need one type each, but it is {words!r}"
        )
    if strange := [word for word in words if word not in known]:
        raise unusable_field(
            "layer_types", why=f"`{strange[0]}` is not one of {', '.join(map(str, known))}"
        )
    return tuple(known[word] for word in words)


def topk(
    config: Mapping[str, object], *names: str, default: int | None = None, num_experts: int
) -> int:
    """Return the number of experts per token. Raises CheckpointError if the model has fewer
    experts."""
    chosen = number(config, *names, default=default, kind=int)
    if not 1 <= chosen <= num_experts:
        raise unusable_field(names[0], why=f"{chosen} of {num_experts} experts cannot be chosen")
    return chosen


def sparse_layers(kinds: object, *, num_layers: int) -> tuple[bool, ...]:
    """Return [num_layers] booleans from `mlp_layer_types`: True for a layer with experts. Raises
    CheckpointError for other words and for another number of layers."""
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not set(kinds) <= {"dense", "sparse"}
    ):
        why = f"{num_layers} layers need as many of dense and sparse, and it is {kinds!r}"
        raise unusable_field("mlp_layer_types", why=why)
    return tuple(kind == "sparse" for kind in kinds)


def eos_token_ids(config: Mapping[str, object]) -> tuple[int, ...]:
    """Return the end-of-sequence ids: none, one or several."""
    ids = config.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(str(ids)),)


def dtype(config: Mapping[str, object]) -> str:
    """Return the dtype of the weights on disk, according to the config."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def refuse(config: Mapping[str, object], name: str, *, unless: object, why: str) -> None:
    """Raise CheckpointError if the config has `name` with another value than `unless` (or null)."""
    value = config.get(name)
    if value is not None and value != unless:
        raise CheckpointError(
            f"a model with `{name}: {value}` is not supported",
            why=why,
            fix=f"use a model with `{name}: {unless}`",
        )


def unusable_field(
    name: str, *, why: str, fix: str = "download the model again, or correct config.json"
) -> CheckpointError:
    """Return the error of a field that cannot be used."""
    return CheckpointError(f"config.json is not supported: `{name}`", why=why, fix=fix)
