"""All experts of a rank as one product: PyTorch's `grouped_mm` instead of a loop over them, where
`models.costs.groups_experts` says that it is faster. Used by `experts`, for Megatron's
SequentialMLP. Weights keep their modules and names, so loading, saving and publishing are
unaffected."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP

from milescli.models.costs import groups_experts
from milescli.platform import exact

ALIGNMENT_BYTES = 16
"""PyTorch's `grouped_mm` only accepts rows whose length is a multiple of this."""


class GroupedExperts(SequentialMLP):
    """Computes the experts of a rank together. Uses Megatron's loop if a layer of an expert has
    hooks (of an adapter), if results must be exact, if rows are not aligned, and if a loop is
    faster."""

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the experts' outputs [T, h], and no bias, for tokens [T, h] that lie expert by
        expert. `tokens_per_expert` [experts of this rank]: their numbers; `permuted_probs` [T]:
        their weights."""
        if not self._can_group():
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        ends = tokens_per_expert.cumsum(0).to(
            dtype=torch.int32, device=permuted_local_hidden_states.device
        )
        # Megatron's own MLP, with its activation, over linear layers that take all experts at once
        together = copy(self.local_experts[0])
        together._modules = dict(together._modules)
        for name in ("linear_fc1", "linear_fc2"):
            linears = [getattr(expert, name) for expert in self.local_experts]
            together._modules[name] = _Grouped(linears, ends)
        return together(permuted_local_hidden_states, permuted_probs)

    def _can_group(self) -> bool:
        first = self.local_experts[0].linear_fc1.weight
        linears = [
            linear
            for expert in self.local_experts
            for linear in (expert.linear_fc1, expert.linear_fc2)
        ]
        hooked = any(len(linear._forward_hooks) > hasattr(linear, "rounding") for linear in linears)
        return (
            len(self.local_experts) > 1
            and not hooked
            and not exact.is_on()
            and all(
                size * first.itemsize % ALIGNMENT_BYTES == 0
                for linear in linears[:2]
                for size in linear.weight.shape
            )
            and groups_experts(
                numbers=first.numel(), dtype=first.dtype, on_cpu=first.device.type == "cpu"
            )
        )


class _Grouped(torch.nn.Module):
    """Multiplies the tokens of each expert by the weight of its layer. The layers are not
    registered here."""

    def __init__(self, linears: Sequence[torch.nn.Module], ends: torch.Tensor) -> None:
        """Use the weights of `linears`. `ends` [experts] int32: the end of each expert's tokens."""
        super().__init__()
        self._linears, self._ends = tuple(linears), ends

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return x [T, columns] times the weights [rows, columns], [T, rows], and no bias."""
        roundings = [getattr(linear, "rounding", None) for linear in self._linears]
        if roundings[0] is not None:
            x = roundings[0].of_input(x)
        weights = [
            linear.weight if rounding is None else rounding.weight()
            for linear, rounding in zip(self._linears, roundings, strict=True)
        ]
        return _Product.apply(x, self._ends, *weights), None


class _Product(torch.autograd.Function):
    """Multiplies by all weights at once, copied into one tensor that exists only during the
    product: autograd would keep one for each layer, as large as all its experts, for the backward
    pass."""

    @staticmethod
    def forward(ctx, x, ends, *weights):
        ctx.save_for_backward(x, ends, *weights)
        return F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, grad):
        x, ends, *weights = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), None
        grads: Sequence[torch.Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            grad_x = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            grads = F.grouped_mm(x.transpose(0, 1), grad, offs=ends).transpose(1, 2).unbind()
        return grad_x, None, *grads
