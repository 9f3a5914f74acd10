"""LoRA adapters on a CPU: nothing is pinned, requests of one adapter are multiplied together, and
experts compute theirs in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from milescli.platform.onednn import product


def install() -> None:
    """Patch the layers that SGLang wraps around those with an adapter."""
    from sglang.srt.lora import layers, mem_pool
    from sglang.srt.lora.backend import base_backend, torch_backend

    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    layers.torch = torch_backend.torch = _unpinned(torch)
    mem_pool.is_pin_memory_available = lambda *_, **__: False
    layers.FusedMoEWithLoRA.forward = experts_forward
    torch_backend.sgemm_lora_a_fwd = _first_product(torch_backend.sgemm_lora_a_fwd)
    torch_backend.sgemm_lora_b_fwd = _second_product(torch_backend.sgemm_lora_b_fwd)
    # for kernels of GPUs; and it fails where requests that are one segment are long together
    base_backend.BaseLoRABackend._add_moe_lora_info = lambda self, forward_batch, info: info


def _unpinned(plain: ModuleType) -> ModuleType:
    """torch, of which no tensor that is made is pinned."""

    class Torch(ModuleType):
        def __getattr__(self, name: str) -> Any:
            value = getattr(plain, name)
            return _without_pins(value) if name in _MAKERS else value

    return Torch("torch")


_MAKERS = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like")


def _without_pins(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, **options)

    return made


def _first_product(of_segments: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """x [tokens, in] -> x A.T times the scaling [tokens, slices * rank]. SGLang's own,
    `of_segments`, reads a dozen small tensors at every layer to find which tokens have which
    adapter; that takes longer than the product of a decode."""

    def first(inputs, weights, batch_info, num_slices=1):
        if (sole := _sole(batch_info)) is None:
            return of_segments(inputs, weights, batch_info, num_slices)
        slot, rank, scaling = sole
        return product(inputs, weights[slot, : num_slices * rank]).mul_(scaling)

    return first


def _second_product(of_segments: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return what `_first_product` gave -> that times B.T of each slice, added to `base_output`
    [tokens, out] where it is given."""

    def second(inputs, weights, batch_info, slice_offsets, base_output=None):
        if (sole := _sole(batch_info)) is None or base_output is None:
            return of_segments(inputs, weights, batch_info, slice_offsets, base_output)
        slot, rank, _ = sole
        for number, (start, end) in enumerate(pairwise(slice_offsets.tolist())):
            part = inputs[:, number * rank : (number + 1) * rank]
            base_output[:, start:end].addmm_(part, weights[slot, start:end, :rank].t())
        return base_output

    return second


def _sole(batch: Any) -> tuple[int, int, float] | None:
    """Return (slot, rank, scaling) of the adapter of all tokens of a batch; None: there are
    several, or there is none. Found once for all layers."""
    if not hasattr(batch, "sole_adapter"):
        batch.sole_adapter = None
        if not batch.use_cuda_graph and len(batch.weight_indices_cpu) == 1:
            slot = int(batch.weight_indices_cpu)
            if rank := int(batch.lora_ranks_cpu[slot]):
                batch.sole_adapter = (slot, rank, float(batch.scalings_cpu[slot]))
    return batch.sole_adapter


def experts_forward(self, hidden_states: torch.Tensor, topk_output: Any, **_: Any) -> torch.Tensor:
    """Compute the chosen experts with their adapters, hidden_states [tokens, hidden] -> the same
    shape. SGLang's own kernels are for GPUs."""
    batch = self.lora_backend.batch_info
    if batch is None:
        return self.base_layer.forward(hidden_states, topk_output)
    base, weights, ids = self.base_layer, topk_output[0], topk_output[1].long()
    slots = torch.repeat_interleave(batch.weight_indices_cpu.long(), batch.seg_lens_cpu.long())
    out = torch.zeros_like(hidden_states)
    for expert in ids.unique().tolist():
        rows, place = (ids == expert).nonzero(as_tuple=True)
        x, slot = hidden_states[rows], slots[rows]
        both = F.linear(x, base.w13_weight[expert])
        pairs = _pairs(self, batch, slot, expert)
        for pair in pairs:
            both[pair.rows] += pair.up(x[pair.rows])
        gate, up = both.chunk(2, dim=1)
        inner = F.silu(gate) * up
        y = F.linear(inner, base.w2_weight[expert])
        for pair in pairs:
            y[pair.rows] += pair.down(inner[pair.rows])
        out.index_add_(0, rows, y * weights[rows, place][:, None].to(y.dtype))
    return out


def _pairs(layer: Any, batch: Any, slot: torch.Tensor, expert: int) -> list[SimpleNamespace]:
    """Of each adapter among these tokens, by its slot: which they are, and what it adds."""
    pairs = []
    for number in slot.unique().tolist():
        rank = int(batch.lora_ranks_cpu[number])
        if rank == 0:
            continue
        outer = 0 if layer.experts_shared_outer_loras else expert
        first = layer.gate_up_lora_a_weights[number, outer]
        second = layer.gate_up_lora_b_weights[number, expert]
        down_a = layer.down_lora_a_weights[number, expert]
        down_b = layer.down_lora_b_weights[number, outer]

        def up(x, first=first, second=second, rank=rank):
            half, between = len(second) // 2, F.linear(x, first)
            gate = F.linear(between[:, :rank], second[:half, :rank])
            return torch.cat([gate, F.linear(between[:, rank : 2 * rank], second[half:, :rank])], 1)

        def down(x, first=down_a, second=down_b, rank=rank):
            return F.linear(F.linear(x, first[:rank]), second[:, :rank])

        pairs.append(SimpleNamespace(rows=slot == number, up=up, down=down))
    return pairs
