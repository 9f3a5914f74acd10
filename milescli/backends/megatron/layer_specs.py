"""Loads the plug-in `model.layer_spec`, which changes what the trainer's layers are made of.
Imports no Megatron: names are resolved before a rank starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milescli.core.errors import RecipeError
from milescli.core.user_code import plugin_fix

DEFAULT = "default"


def unchanged(*, spec: Any, config: Any, facts: Any, layer: int) -> Any:
    """Return the spec that miles builds, unchanged."""
    return spec


def apply_to_spec(change: Callable[..., Any], **of_layer: Any) -> Any:
    """Return a layer's spec as `change` returns it. Raises RecipeError if that is not a spec."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    made = change(**of_layer)
    if not isinstance(made, ModuleSpec):
        raise RecipeError(
            f"the layer spec of layer {of_layer['layer']} is {made!r:.200}",
            why="Megatron builds a layer from a ModuleSpec",
            fix=plugin_fix(change, "it returns the spec that it was given, changed"),
        )
    return made
