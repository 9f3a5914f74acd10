"""Tests the contract of this package's plug-ins; plug-in authors can run it. A run does not use
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milescli.backends.megatron import cpu_compat
from milescli.backends.megatron.layer_specs import apply_to_spec
from milescli.models import parse_facts, scratch
from milescli.plan.types import TrainerLayout
from milescli.recipe.model import ScratchModel


def check_layer_spec(change: Callable[..., Any]) -> None:
    """Apply the plug-in to the layers of a small dense model. Raises RecipeError."""
    cpu_compat.install()
    import torch

    from milescli.backends.megatron.architecture.model import build_config
    from milescli.backends.megatron.architecture.specs import layer_spec

    facts = parse_facts(scratch.config_of(ScratchModel()))
    config = build_config(
        facts,
        TrainerLayout(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        recompute="none",
        routing_replay=False,
    )
    for layer in range(facts.num_layers):
        spec = layer_spec(config, facts, layer=layer, engine=False)
        apply_to_spec(change, spec=spec, config=config, facts=facts, layer=layer)
