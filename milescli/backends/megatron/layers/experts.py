"""Experts: how a family's router chooses and weights them, and Megatron's settings for them and for
plain MLPs. Used by `model`, `specs`."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from milescli.backends.megatron.cpu_compat import define_te_gemm
from milescli.backends.megatron.layers.grouped_experts import GroupedExperts
from milescli.models.facts import ModelFacts
from milescli.platform import exact

_GELU_TANH = partial(F.gelu, approximate="tanh")


def mlp_options(facts: ModelFacts) -> dict[str, object]:
    """Return Megatron's settings of every MLP: plain, shared, or that of an expert."""
    activation = {
        "silu": F.silu,
        "gelu_tanh": _GELU_TANH,
        "relu2": squared_relu,
        "clamped_swiglu": quick_gelu,
    }
    options: dict[str, object] = {
        "gated_linear_unit": facts.gated_mlp,
        "activation_func": activation[facts.activation],
        "add_bias_linear": facts.mlp_bias,
    }
    if facts.activation_limit is not None:
        options["activation_func_clamp_value"] = facts.activation_limit
    if facts.activation == "clamped_swiglu":
        options["glu_linear_offset"] = 1.0
    return options


def options(facts: ModelFacts, *, routing_replay: bool, grouped: bool) -> dict[str, object]:
    """Return Megatron's settings of the experts. How they are chosen is left to `Router`, since
    Megatron's fields cannot express it for every family."""
    define_te_gemm()
    settings: dict[str, object] = {
        "num_moe_experts": facts.num_experts,
        "moe_router_topk": facts.topk,
        "moe_ffn_hidden_size": facts.moe_ffn_hidden_size,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        # Megatron refuses one expert per token otherwise
        "moe_router_pre_softmax": facts.topk == 1,
        "moe_grouped_gemm": grouped,
        "moe_enable_routing_replay": routing_replay,
    }
    if facts.shared_expert_ffn_hidden_size:
        settings["moe_shared_expert_intermediate_size"] = facts.shared_expert_ffn_hidden_size
        settings["moe_shared_expert_gate"] = facts.shared_expert_gate
    if facts.moe_latent_size:
        settings["moe_latent_size"] = facts.moe_latent_size
    if facts.num_moe_layers < facts.num_layers:
        settings["moe_layer_freq"] = [
            int(facts.is_moe_layer(layer)) for layer in range(facts.num_layers)
        ]
    return settings


def adapt(mlp: ModuleSpec, facts: ModelFacts) -> None:
    """Put this family's router into Megatron's spec of a layer with experts."""
    mlp.submodules.router = partial(Router, facts=facts)
    if facts.mlp_bias and mlp.submodules.experts.submodules is not None:
        mlp.submodules.experts.submodules.linear_fc2 = _ExpertDown
    elif mlp.submodules.experts.module is SequentialMLP:
        mlp.submodules.experts.module = GroupedExperts


class _ExpertDown(RowParallelLinear):
    """Implements an expert's second layer with a bias. Megatron adds the bias, times the expert's
    weight, to the output of every rank that holds a part of the expert, and sums the outputs
    afterwards, so each rank adds its share."""

    def __init__(self, *args, **options) -> None:
        """Called by Megatron, which marks the bias as shared by all tp ranks; it belongs to this
        expert alone."""
        super().__init__(*args, **options)
        self.bias.sequence_parallel = False
        if self.tp_group.size() == 1:
            # counted in the gradient's norm on every rank, as no two hold the same expert
            tensor_parallel.set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, input_):
        """Return a clone, since Megatron adds in place, which autograd forbids if the output is the
        unchanged input."""
        output, bias = super().forward(input_)
        ranks = self.tp_group.size()
        if ranks > 1:
            bias = (
                tensor_parallel.copy_to_tensor_model_parallel_region(bias, group=self.tp_group)
                / ranks
            )
        return output if self.explicit_expert_comm else output.clone(), bias


class Router(TopKRouter):
    """Chooses experts as Hugging Face's implementations of the families do, in Megatron's router:
    any score, normalised or not, with a correction that affects the choice alone (arXiv 2408.15664)
    and a choice of groups before that of experts (arXiv 2412.19437, section 2.1.2). The correction,
    `expert_bias`, is loaded and saved, never updated: Megatron does not get it."""

    def __init__(self, config, pg_collection=None, *, facts: ModelFacts) -> None:
        """Called by Megatron's MoE layer."""
        super().__init__(config=config, pg_collection=pg_collection)
        self.facts = facts
        device = torch.cuda.current_device()
        self.is_counted: torch.Tensor | None = None
        """[S * B] tokens whose replayed routes are held against the router's own; None: none."""
        self.route_counts = torch.zeros(2, dtype=torch.float64, device=device)
        """(replayed routes that the router would not have chosen, all that were counted)"""
        if facts.router_bias:
            del self.expert_bias  # None so far
            self.register_buffer(
                "expert_bias", torch.zeros(facts.num_experts, dtype=torch.float32, device=device)
            )

    def routing(self, logits, padding_mask=None):
        """Return weights and choice, both [S * B, experts], for logits [S, B, experts]. Called by
        Megatron."""
        logits = logits.view(-1, self.facts.num_experts)
        scores = self._scores(logits)
        wanted = scores if self.expert_bias is None else scores + self.expert_bias
        choose = (
            self._choose
            if self.router_replay is None
            else partial(self.router_replay.get_replay_topk, default_compute_topk=self._choose)
        )
        _, chosen = choose(wanted, self.topk)
        if self.is_counted is not None:
            self._count(wanted.detach(), chosen, self.is_counted)
        weights = self._weights(logits, scores, chosen) * self.facts.router_scaling
        spread = torch.zeros_like(logits).scatter_add(1, chosen, weights)
        return spread, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)

    def _count(self, wanted: torch.Tensor, chosen: torch.Tensor, mask: torch.Tensor) -> None:
        own = torch.zeros_like(wanted, dtype=torch.bool)
        own.scatter_(1, self._choose(wanted, self.topk)[1], True)
        differs = ~own.gather(1, chosen) & mask[:, None]
        self.route_counts += torch.stack([differs.sum(), mask.sum() * chosen.shape[1]])

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        if self.facts.router_score == "softmax":
            return torch.softmax(logits, dim=-1)
        if self.facts.router_score == "sigmoid":
            return torch.sigmoid(logits)
        return F.softplus(logits).sqrt()

    def _weights(
        self, logits: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        if not self.facts.normalize_topk:
            return scores.gather(1, chosen)
        if self.facts.router_score == "softmax" and not exact.is_on():
            return torch.softmax(logits.gather(1, chosen), dim=-1)
        # as engines do, bit for bit
        weights = scores.gather(1, chosen)
        return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)

    def _choose(
        self, wanted: torch.Tensor, topk: int, num_groups=None, group_topk=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores, numbers) of the best experts, [tokens, topk] each. The signature is that
        with which Megatron's replay calls it."""
        groups, topk_groups = self.facts.router_groups, self.facts.router_topk_groups
        if topk_groups < groups:
            grouped = wanted.unflatten(-1, (groups, -1))
            worth = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
            best = torch.zeros_like(worth, dtype=torch.bool).scatter(
                -1, worth.topk(topk_groups, dim=-1).indices, True
            )
            wanted = grouped.masked_fill(~best[..., None], float("-inf")).flatten(-2)
        return torch.topk(wanted, k=topk, dim=-1)


class LatentExperts(MoELayer):
    """Adds plain projections to Megatron's layer, under the names of those that exist only with
    TransformerEngine."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        pg_collection=None,
    ) -> None:
        """Called by Megatron."""
        pg_collection = pg_collection or get_default_pg_collection()
        # first without projections and experts, then with both: Megatron would ask for
        # TransformerEngine
        full_width = copy(config)
        full_width.moe_latent_size = None
        super().__init__(
            full_width, replace(submodules, experts=IdentityOp), layer_number, pg_collection
        )
        self.config, self.submodules = config, submodules
        self.experts = build_module(
            submodules.experts, self.num_local_experts, config, pg_collection=pg_collection
        )
        self.fc1_latent_proj = Projection(config.hidden_size, config.moe_latent_size, config=config)
        self.fc2_latent_proj = Projection(config.moe_latent_size, config.hidden_size, config=config)


class Projection(torch.nn.Module):
    """Computes x @ weight^T, with the same weight on every rank, for the positions that the rank
    has. No bias."""

    def __init__(self, inputs: int, outputs: int, *, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # its gradient is summed over tp ranks, which hold different positions
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the product, and no bias, as Megatron's linear layers do."""
        return F.linear(x, self.weight), None
