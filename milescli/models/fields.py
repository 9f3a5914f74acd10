"""Reading fields of a config.json with named refusals. Used by the family files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from milescli.core.errors import CheckpointError
from milescli.models.facts import Rope

Value = TypeVar("Value", int, float, bool)


def number(config: Mapping[str, object], *names: str, default: Value | None = None, kind: type[Value]) -> Value:
    """The first of `names` that the config has, as `kind`. Raises CheckpointError where none is there and there is no default."""
    for name in names:
        found = config.get(name)
        if found is None:
            continue
        if isinstance(found, bool) is not (kind is bool) or not isinstance(found, int | float):
            raise _unusable(names[0], why=f"`{name}` is {found!r}, not a {kind.__name__}")
        return kind(found)
    if default is None:
        raise _unusable(names[0], why=f"config.json has no `{'` or `'.join(names)}`")
    return default


def rope(config: Mapping[str, object], *, share: float | None = None) -> Rope:
    """Rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`. `share`: what
    `partial_rotary_factor` says, where the family knows better."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise _unusable("rope_parameters", why=f"it is {nested!r}, not an object")
    kind = nested.get("rope_type") or nested.get("type") or "default"
    if kind != "default":
        raise CheckpointError(
            f"rotary embedding `{kind}` is not supported yet",
            why="the trainer would compute other positions than the engine",
            fix='set "rope_type": "default" in config.json if the prompts stay within the original context length',
        )
    both = {**config, **nested}
    return Rope(
        theta=number(both, "rope_theta", default=10_000.0, kind=float),
        share=share if share is not None else number(both, "partial_rotary_factor", default=1.0, kind=float),
    )


def eos_token_ids(config: Mapping[str, object]) -> tuple[int, ...]:
    """End-of-sequence ids, none, one or many."""
    found = config.get("eos_token_id")
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(str(found)),)


def dtype(config: Mapping[str, object]) -> str:
    """Dtype of the weights on disk, as the config says."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def refuse(config: Mapping[str, object], name: str, *, unless: object, why: str) -> None:
    """Raise CheckpointError where the config has `name` with another value than `unless` (or null)."""
    found = config.get(name)
    if found is not None and found != unless:
        raise CheckpointError(
            f"a model with `{name}: {found}` is not supported",
            why=why,
            fix=f"use a model with `{name}: {unless}`",
        )


def _unusable(name: str, *, why: str) -> CheckpointError:
    return CheckpointError(f"config.json cannot be used: `{name}`", why=why, fix="fetch the model again, or mend config.json")
