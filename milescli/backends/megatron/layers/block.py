"""A layer whose parts are normalised again before they are added to the residual stream (GLM-4,
Gemma). Used by `specs`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


@cache
def with_bias(module: type, has_bias: bool) -> type:
    """Return a subclass of Megatron's `module` whose instances have a bias, or have none."""

    class Linear(module):
        def __init__(self, *args, bias: bool = False, **options) -> None:
            super().__init__(*args, bias=has_bias, **options)

    Linear.__name__ = Linear.__qualname__ = module.__name__
    return Linear


@dataclass
class SandwichSubmodules(TransformerLayerSubmodules):
    """Adds the two norms after the parts to the submodules of Megatron's layer."""

    post_self_attn_layernorm: ModuleSpec | type | None = None
    post_mlp_layernorm: ModuleSpec | type | None = None


class SandwichLayer(TransformerLayer):
    """Computes x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): the outer norms are
    `post_self_attn_layernorm` and `post_mlp_layernorm`, named as Megatron's own are."""

    def __init__(self, config, submodules: SandwichSubmodules, *args, **options) -> None:
        """Called by Megatron."""
        super().__init__(config, submodules, *args, **options)
        shape = {
            "config": config,
            "hidden_size": config.hidden_size,
            "eps": config.layernorm_epsilon,
        }
        self.post_self_attn_layernorm = build_module(submodules.post_self_attn_layernorm, **shape)
        self.post_mlp_layernorm = build_module(submodules.post_mlp_layernorm, **shape)
        self.self_attn_bda = _normalised(self.self_attn_bda, self.post_self_attn_layernorm)
        self.mlp_bda = _normalised(self.mlp_bda, self.post_mlp_layernorm)
        # Megatron adds with gradients switched on, which costs nothing there: here it would record
        # the norms while only scoring
        self.bias_dropout_add_exec_handler = nullcontext


def _normalised(bias_dropout_add: Callable, norm: Callable) -> Callable:
    """Return Megatron's function that adds a part's output to the residual stream, changed to
    normalise the output (with its bias) first."""

    def prepare(training: bool, fused: bool) -> Callable:
        add = bias_dropout_add(training, fused)

        def normalise_and_add(output_with_bias, residual, dropout):
            output, bias = output_with_bias
            return add((norm(output if bias is None else output + bias), None), residual, dropout)

        return normalise_and_add

    return prepare


def sandwich(layer: ModuleSpec, *, norm: type) -> ModuleSpec:
    """Return Megatron's layer spec with `norm` also after attention and MLP."""
    parts = SandwichSubmodules(
        **vars(layer.submodules), post_self_attn_layernorm=norm, post_mlp_layernorm=norm
    )
    return ModuleSpec(module=SandwichLayer, submodules=parts, params=layer.params)
