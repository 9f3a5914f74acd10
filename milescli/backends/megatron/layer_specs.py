"""What the trainer's layers are made of, by name: `model.layer_spec`. Imports no Megatron: names
are resolved before a rank is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milescli.core.errors import RecipeError
from milescli.core.user_code import mend

DEFAULT = "default"


def unchanged(*, spec: Any, config: Any, facts: Any, layer: int) -> Any:
    """As `miles` builds it."""
    return spec


def respecified(change: Callable[..., Any], **of_layer: Any) -> Any:
    """What `change` makes of a layer's spec. Raises RecipeError where that is none."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    made = change(**of_layer)
    if not isinstance(made, ModuleSpec):
        raise RecipeError(
            f"the layer spec of layer {of_layer['layer']} is {made!r:.200}",
            why="Megatron builds a layer of a ModuleSpec",
            fix=mend(change, "it returns the spec that it was given, changed"),
        )
    return made
