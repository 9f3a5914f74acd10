"""Adds LoRA to Megatron's linear layers under any layout: `models.adapter` defines the parameters,
and the adapted layer decides how they act. The base is frozen.

For x [S, B, in]: y = W x + scaling * B (A x). A layer in which Megatron fuses several matrices
(query, key and value) has a pair for each; A x is computed for all at once, and the rows of the Bs
go to the rows of their matrices in the fused one.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from safetensors import safe_open

from milescli.backends.megatron.cpu.linear import product
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.state.weights import LocalWeight, cut, local_weights
from milescli.checkpoint.weight_files import digest_of
from milescli.core.errors import CheckpointError
from milescli.models.adapter import (
    PEFT_WEIGHTS,
    A,
    B,
    LoraShape,
    checkpoint_key,
    experts_module,
    is_shared,
    merge_weight,
    parts_of,
    read_shape,
)
from milescli.models.base import Entry, Rule, WeightTable
from milescli.models.facts import ModelFacts


class Adapters:
    """Manages the adapter of one model on this rank."""

    def __init__(
        self,
        model: GPTModel,
        base: Sequence[LocalWeight],
        table: WeightTable,
        *,
        shape: LoraShape,
        mesh: Mesh,
        folder: Path,
        seed: int,
        dropout: float = 0.0,
    ) -> None:
        """Freeze `model`, whose weights are `base`, and add a new adapter: A is random, determined
        by `seed` and names alone, B is zero. `table` is the adapter's, `folder` the model's."""
        self.shape, self.table, self._mesh = shape, table, mesh
        self.base_mark = digest_of(folder)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        by_module = defaultdict[str, list[Entry]](list)
        for entry in table.entries:
            by_module[parts_of(entry.megatron)[0]].append(entry)
        self._pairs = list[_LayerPairs]()
        self._of_weight = dict[str, _LayerPairs]()
        """Name of an adapted layer's matrix -> its pairs."""
        for weight in base:
            module_name, _, last = weight.name.rpartition(".")
            adapted = by_module.get(weight.entry.megatron.removesuffix(".weight"), [])
            if last != "weight" or not adapted:
                continue
            if weight.entry.expert is not None:
                around = by_module.get(experts_module(weight.entry.megatron), [])
                leaves = {name.rsplit(".", 2)[1] for name in weight.entry.hf}
                adapted = [*adapted, *(e for e in around if parts_of(e.megatron)[2] in leaves)]
            pair = _LayerPairs(
                model.get_submodule(module_name),
                model.get_submodule(experts_module(module_name)),
                weight,
                adapted,
                mesh=mesh,
                scaling=shape.scaling,
                dropout=dropout,
            )
            self._pairs.append(pair)
            self._of_weight[weight.name] = pair
        self.reset(seed)
        _let_gradients_through(model)
        self.weights = local_weights(model, table, mesh, of_adapter=True)
        """Of the adapter alone, in the order of the model."""

    def merged(self, weight: LocalWeight) -> torch.Tensor:
        """Return this rank's part of a weight of the model with the adapter merged in."""
        pairs = self._of_weight.get(weight.name)
        return weight.parameter if pairs is None else pairs.merged(weight.parameter)

    def set_dropout(self, is_on: bool) -> None:
        """Apply dropout from now on, or stop it. A pass that trains needs it, and one that only
        scores does not. Whether autograd records cannot tell them apart: recomputation runs its
        first forward pass without gradient, and its outputs are those of the loss."""
        for pair in self._pairs:
            pair.drops = is_on

    def sharded_state(self) -> dict[str, ShardedTensor]:
        """Return the matrices by name, as `dist_checkpointing` saves and loads them under any
        layout."""
        return {
            checkpoint_key(weight.entry): self._sharded(weight.parameter, weight.entry)
            for weight in self.weights
        }

    def _sharded(self, tensor: torch.Tensor, entry: Entry) -> ShardedTensor:
        sharding, mesh = entry.rule.sharding, self._mesh
        count, number = cut(sharding, mesh)
        is_expert = entry.expert is not None
        same_as = mesh.etp_rank if is_expert else mesh.tp_rank
        replica = (
            parallel_state.get_expert_data_parallel_rank()
            if is_expert
            else parallel_state.get_data_parallel_rank(with_context_parallel=True)
        )
        return ShardedTensor.from_rank_offsets(
            checkpoint_key(entry),
            tensor,
            (sharding.dim, number, count),
            replica_id=(0, same_as if sharding.axis == "none" else 0, replica),
        )

    def reset(self, seed: int) -> None:
        """Reinitialise the adapter: A is random, determined by `seed` and names alone, B is
        zero."""
        for pair in self._pairs:
            pair.reset(seed)

    @torch.no_grad()
    def load_peft(self, folder: Path) -> None:
        """Load the matrices of a PEFT folder, whose adapter has this shape and scaling."""
        with safe_open(folder / PEFT_WEIGHTS, framework="pt") as tensors:
            for weight in self.weights:
                whole = tensors.get_tensor(weight.entry.hf[0])
                whole = whole if weight.entry.row is None else whole[weight.entry.row]
                (whole,) = weight.entry.rule.to_parts([whole], weight.entry.facts)
                weight.parameter.copy_(_own_part(whole, weight.entry, self._mesh))

    def require_matching(self, checkpoint: Path) -> None:
        """Raise CheckpointError if the checkpoint is not one of an adapter with this shape and
        base."""
        recorded = read_shape(checkpoint)
        if recorded != (self.shape, self.base_mark):
            there = "all weights of a model" if recorded is None else "another adapter"
            if recorded is not None and recorded[0] == self.shape:
                there = "an adapter of another base model"
            raise CheckpointError(
                f"the checkpoint `{checkpoint}` does not belong to this run's adapter",
                why=f"it contains {there}; this run trains one of rank {self.shape.rank} and "
                f"alpha {self.shape.alpha:g} at {', '.join(self.shape.targets)}",
                fix="resume the run with its original recipe and model",
            )


class _LayerPairs:
    """Holds the A and B pairs of one linear layer."""

    def __init__(
        self,
        module: torch.nn.Module,
        around: torch.nn.Module,
        weight: LocalWeight,
        entries: Sequence[Entry],
        *,
        mesh: Mesh,
        scaling: float,
        dropout: float,
    ) -> None:
        """Attach pairs to the layer of `weight`; `entries` are A and B of each of its adapted
        matrices. For an expert's layer, `around` is the module that holds the pairs that all
        experts share."""
        self._entries, self._mesh = entries, mesh
        self._scaling, self._dropout = scaling, dropout
        self.drops = False
        """True if dropout is applied."""
        base, rule = weight.parameter, weight.entry.rule
        size, _ = cut(rule.sharding, mesh)
        self._cut = rule.sharding.dim if size > 1 else None
        """Along which dim of the layer's matrix its ranks share it; None: each has all of it."""
        self._is_expert = rule.is_per_expert
        self._group = mesh.etp_group if self._is_expert else mesh.tp_group
        self._by_sequence = (
            self._cut is not None and not self._is_expert and bool(module.sequence_parallel)
        )
        """Its ranks share the sequence before it (dim 0), or after it (dim 1)."""
        leaves = [name.rsplit(".", 2)[1] for name in weight.entry.hf]
        self._numbers = [leaves.index(parts_of(e.megatron)[2]) for e in entries if _is(e, A)]
        """[pairs] of the layer's matrices."""
        self._rows = _rows_of(rule, weight.entry.facts, size, base.device)
        self._matrices = {A: list[torch.nn.Parameter](), B: list[torch.nn.Parameter]()}
        """[pairs]"""
        self._shares = any(map(is_shared, entries))
        for entry in entries:
            _, which, leaf = parts_of(entry.megatron)
            holder = around if is_shared(entry) else module
            if not hasattr(holder, which):
                setattr(holder, which, torch.nn.ParameterDict())
            tensors = getattr(holder, which)
            if leaf not in tensors:
                tensors[leaf] = self._parameter(entry, base)
            self._matrices[which].append(tensors[leaf])
        module.register_forward_hook(self._add)

    def _parameter(self, entry: Entry, base: torch.Tensor) -> torch.nn.Parameter:
        """Create a matrix with the attributes that Megatron sets on the layer's weight. A matrix
        that all experts of all ranks share gets those of the router instead: its gradient is summed
        over all ranks, each of which has its own tokens."""
        shape, sharding = list(_size(entry)), entry.rule.sharding
        count, _ = cut(sharding, self._mesh)
        shape[sharding.dim] //= count
        parameter = torch.nn.Parameter(
            torch.zeros(shape, dtype=base.dtype, device=base.device), requires_grad=True
        )
        if is_shared(entry):
            layout = self._mesh.layout
            parameter.sequence_parallel = layout.sequence_parallel and layout.tp > 1
            return parameter
        if hasattr(base, "allreduce"):
            parameter.allreduce = base.allreduce
        by_sequence = self._by_sequence and sharding.axis == "none"
        parameter.sequence_parallel = by_sequence or bool(getattr(base, "sequence_parallel", False))
        if self._is_expert and sharding.axis == "none" and self._mesh.etp_rank == 0:
            # counted in the gradient's norm once for each expert: no two groups hold the same
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Initialise as PEFT does: A uniform within 1 / sqrt(in) (Kaiming's bound for a = sqrt(5)),
        B zero. Equal seeds give equal matrices under any layout."""
        taken = {A: iter(self._matrices[A]), B: iter(self._matrices[B])}
        for entry in self._entries:
            which = parts_of(entry.megatron)[1]
            matrix = next(taken[which])
            if which == B:
                matrix.zero_()
                continue
            name = entry.hf[0] if entry.row is None else f"{entry.hf[0]} {entry.row}"
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            chance = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            whole = torch.empty(_size(entry))
            bound = 1 / math.sqrt(whole.shape[1])
            whole.uniform_(-bound, bound, generator=chance)
            matrix.copy_(_own_part(whole, entry, self._mesh))

    def _add(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Add the adapter's output to the layer's output; a forward hook."""
        if not isinstance(output, tuple):
            return output + self._delta(inputs[0])
        return (output[0] + self._delta(inputs[0]), *output[1:])

    def _delta(self, x: torch.Tensor) -> torch.Tensor:
        """Return the adapter's output, [..., in] -> [..., out], sharded as the layer's output
        is."""
        if self.drops and self._dropout:
            x = F.dropout(x, self._dropout)
        firsts, second = self._matrices[A], self._fused(self._matrices[B])
        first = torch.cat(firsts) if len(firsts) > 1 else firsts[0]
        if self._cut is None:
            return product(product(x, first) * self._scaling, second)
        if self._is_expert:
            # the ranks' inputs are gathered, and their outputs summed, around all experts: what
            # every rank holds gets the sum of the ranks' gradients; what experts share gets it with
            # that of all ranks
            if not self._shares and self._cut == 0:
                first = copy_to_tensor_model_parallel_region(first, group=self._group)
            elif not self._shares:
                second = copy_to_tensor_model_parallel_region(second, group=self._group)
            return product(product(x, first) * self._scaling, second)
        between = product(x, first) * self._scaling
        if self._cut == 0:
            between = (
                gather_from_sequence_parallel_region(between, group=self._group)
                if self._by_sequence
                else copy_to_tensor_model_parallel_region(between, group=self._group)
            )
        else:
            between = (
                reduce_scatter_to_sequence_parallel_region(between, group=self._group)
                if self._by_sequence
                else reduce_from_tensor_model_parallel_region(between, group=self._group)
            )
        return product(between, second)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W + scaling * B A, [out, in], sharded as the layer's matrix `weight` is."""
        firsts, seconds = (
            [matrix.detach().to(self._mesh.device) for matrix in self._matrices[which]]
            for which in (A, B)
        )
        here = weight.detach().to(self._mesh.device)
        second = self._fused(seconds)
        return merge_weight(here, torch.cat(firsts), second, scaling=self._scaling)

    def _fused(self, seconds: list[torch.Tensor]) -> torch.Tensor:
        """Join the Bs [out_i, r] into [out, r of all pairs], with rows in the order of the fused
        matrix: each B has its own columns, and zeros at the rows of the other matrices."""
        if self._rows is None:
            return seconds[0]
        parts, at = [], 0
        width = sum(second.shape[1] for second in seconds)
        own = dict(zip(self._numbers, seconds, strict=True))
        for number, length in enumerate(self._rows.lengths):
            if number not in own:
                parts.append(seconds[0].new_zeros((length, width)))
                continue
            second = own[number]
            parts.append(F.pad(second, (at, width - at - second.shape[1])))
            at += second.shape[1]
        return torch.cat(parts)[self._rows.order]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Locates the rows of the parts of a fused matrix."""

    lengths: Sequence[int]
    """[parts] number of rows of each part."""
    order: torch.Tensor
    """[rows of all parts] for each row of the fused matrix, its index among the rows of the
    concatenated parts."""


@lru_cache(maxsize=256)
def _rows_of(rule: Rule, facts: ModelFacts, size: int, device: torch.device) -> _Rows | None:
    """Return the rows of each part, found by fusing row numbers; None if the matrix is a single
    part. `size`: number of ranks that share the matrix."""
    shapes = [list(shape) for shape in rule.shapes(facts)]
    for shape in shapes:
        if rule.sharding.axis != "none":
            shape[rule.sharding.dim] //= size
    lengths, columns = [shape[0] for shape in shapes], shapes[0][1]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    numbers = [
        torch.arange(end - length, end, dtype=torch.int32)[:, None].expand(length, columns)
        for end, length in zip(ends, lengths, strict=True)
    ]
    order = rule.fuse(numbers, facts)
    assert order.shape == (ends[-1], columns) and bool((order == order[:, :1]).all()), (
        f"{rule.megatron} is not a matrix with reordered rows"
    )
    rows = order[:, 0].long()
    if len(shapes) == 1 and torch.equal(rows, torch.arange(ends[-1])):
        return None
    return _Rows(lengths, rows.to(device))


def _own_part(whole: torch.Tensor, entry: Entry, mesh: Mesh) -> torch.Tensor:
    """Return this rank's shard of a whole tensor."""
    count, number = cut(entry.rule.sharding, mesh)
    return whole.chunk(count, dim=entry.rule.sharding.dim)[number]


def _size(entry: Entry) -> tuple[int, ...]:
    """Return [rows, columns] of the whole matrix."""
    return entry.shapes[0][-2:]


def _is(entry: Entry, which: str) -> bool:
    return parts_of(entry.megatron)[1] == which


def _let_gradients_through(model: GPTModel) -> None:
    """Make the embedding's output require a gradient. Recomputation differentiates only with
    respect to its inputs, and nothing before the first adapted layer is trained."""
    embedding = getattr(model, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_() if module.training else None
        )
