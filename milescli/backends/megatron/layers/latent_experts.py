"""Experts that work at a smaller width, between two projections (Nemotron 3 Super), with Megatron's
MoE layer. Used by `hybrid`."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import build_module


class LatentExperts(MoELayer):
    """Megatron's layer, whose two projections exist with TransformerEngine only, with plain ones of
    the same names."""

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
    """x @ weight^T on every rank alike, for the positions that the rank holds. No bias."""

    def __init__(self, inputs: int, outputs: int, *, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # its gradient is summed over tp ranks, which hold different positions
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Megatron's linear layers return a bias too."""
        return F.linear(x, self.weight), None
