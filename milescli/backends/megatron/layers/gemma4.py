"""Gemma 4's layers, for which Megatron-Core has no modules: other heads in layers that attend to
all positions, values that are normalised (and may be the keys' projection), experts parallel to a
plain MLP, a number that scales the layer. Used by `specs`."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from milescli.backends.megatron.layers.block import SandwichLayer
from milescli.backends.megatron.layers.experts import Router
from milescli.backends.megatron.layers.norm import RmsNorm
from milescli.models.facts import ModelFacts


def options(facts: ModelFacts) -> dict[str, object]:
    """Return Megatron's settings: layers that differ are saved separately."""
    alike = all(layer.head_dim is None and layer.num_kv_heads is None for layer in facts.layers)
    return {} if alike else {"hetereogenous_dist_checkpoint": True}


def adapt(spec: ModuleSpec, facts: ModelFacts, *, layer: int) -> ModuleSpec:
    """Return a sandwich layer's spec, adapted to layer `layer` (from 0) of a Gemma 4."""
    parts = spec.submodules
    parts.self_attention.module = ValueNormAttention
    parts.self_attention.params = {**parts.self_attention.params, "facts": facts, "layer": layer}
    if facts.experts_beside_mlp:
        parts.pre_mlp_layernorm = IdentityOp
        parts.mlp.submodules.router = partial(ScaledRouter, facts=facts)
        # no ModuleSpec: Megatron warns of those whose class it does not know
        parts.mlp = SimpleNamespace(
            module=ExpertsBesideMlp, params={}, submodules=parts.mlp.submodules
        )
    return ModuleSpec(module=ScaledLayer, submodules=parts, params=spec.params)


class ScaledLayer(SandwichLayer):
    """Multiplies its output by one number, `layer_scalar`, which is not trained."""

    def __init__(self, config, *args, **options) -> None:
        """Called by Megatron."""
        super().__init__(config, *args, **options)
        self.register_buffer(
            "layer_scalar",
            torch.ones(1, dtype=config.params_dtype, device=torch.cuda.current_device()),
        )

    def forward(self, *args, **options):
        """Return the scaled output of Megatron's layer."""
        output, context = super().forward(*args, **options)
        return output * self.layer_scalar, context


class ValueNormAttention(SelfAttention):
    """Implements attention with the layer's own number and width of heads. Values are normalised
    per head, without a weight. If keys and values share a projection, `linear_qkv` has no rows for
    values: for each key-value head it has the queries, then the key."""

    def __init__(self, config, submodules, *args, facts: ModelFacts, layer: int, **options) -> None:
        """Called by Megatron with the config of all layers."""
        heads = facts.at(layer)
        own = copy(config)
        own.kv_channels, own.num_query_groups = heads.head_dim, heads.num_kv_heads
        self.key_is_value = facts.layers[layer].key_is_value
        if self.key_is_value:
            rows = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
            submodules = replace(submodules, linear_qkv=_of_rows(submodules.linear_qkv, rows))
        super().__init__(own, submodules, *args, **options)

    def get_query_key_value_tensors(
        self, hidden_states, key_value_states=None, output_gate=False, split_qkv=True
    ):
        """Return queries [S, 1, heads, d], keys and values [S, 1, groups, d] of hidden states [S,
        1, hidden]. Called by Megatron."""
        assert split_qkv and not output_gate
        if not self.key_is_value:
            query, key, value = super().get_query_key_value_tensors(hidden_states, key_value_states)
            return query, key, _normalised(value, self.config.layernorm_epsilon)
        mixed, _ = self.linear_qkv(hidden_states)
        dim = self.hidden_size_per_attention_head
        grouped = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1, dim))
        query, key = grouped[..., :-1, :].flatten(2, 3), grouped[..., -1, :]
        return (
            self.q_layernorm(query),
            self.k_layernorm(key),
            _normalised(key, self.config.layernorm_epsilon),
        )


def _of_rows(linear, rows: int):
    """Build a linear layer with this number of rows, whatever number Megatron asks for."""
    return lambda inputs, outputs, **options: linear(inputs, rows, **options)


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dim, in float32."""
    wide = x.float()
    return (wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


class ScaledRouter(Router):
    """Routes by the layer's normalised input times a learned vector / sqrt(hidden_size); each
    chosen expert's weight is multiplied by a learned number of that expert."""

    def __init__(self, config, pg_collection=None, *, facts: ModelFacts) -> None:
        """Called by Megatron's MoE layer."""
        super().__init__(config, pg_collection, facts=facts)
        like = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.scale = torch.nn.Parameter(torch.ones(config.hidden_size, **like))
        self.per_expert_scale = torch.nn.Parameter(torch.ones(facts.num_experts, **like))
        for parameter in (self.scale, self.per_expert_scale):
            # tp ranks hold different positions, so the gradients are summed
            parameter.sequence_parallel = config.sequence_parallel

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return logits [S, 1, experts] of hidden states [S, 1, hidden]. Called by Megatron."""
        normal = _normalised(input, self.config.layernorm_epsilon)
        return super().gating(normal * self.scale * self.config.hidden_size**-0.5)

    def _weights(self, logits, scores, chosen) -> torch.Tensor:
        return super()._weights(logits, scores, chosen) * self.per_expert_scale[chosen]


class ExpertsBesideMlp(MoELayer):
    """Computes norm(mlp(norm(x))) + norm(experts(norm(x))), routed by x itself. The plain MLP is
    Megatron's `shared_experts`."""

    def __init__(self, config, *args, **options) -> None:
        """Called by Megatron."""
        super().__init__(config, *args, **options)
        for name in ("pre_shared", "post_shared", "pre_experts", "post_experts"):
            setattr(
                self,
                f"{name}_layernorm",
                RmsNorm(config, config.hidden_size, eps=config.layernorm_epsilon),
            )

    def forward(self, hidden_states, intermediate_tensors=None, padding_mask=None):
        """Return the output, [S, 1, hidden], and no bias. Called by Megatron."""
        assert intermediate_tensors is None
        plain = self.post_shared_layernorm(
            self.shared_experts(self.pre_shared_layernorm(hidden_states))
        )
        weights, choice = self.route(hidden_states, padding_mask)
        routed, weights = self.preprocess(
            self.pre_experts_layernorm(hidden_states), weights, choice
        )
        routed, weights = self.dispatch(routed, weights)
        routed, _ = self.routed_experts_compute(routed, weights)
        return plain + self.post_experts_layernorm(
            self.postprocess(self.combine(routed), None)
        ), None
