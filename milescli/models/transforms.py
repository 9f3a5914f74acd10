"""Transforms weights between Hugging Face and Megatron shapes, for the rules of the families. Pure;
loads torch at the first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from milescli.models.base import Shapes
from milescli.models.facts import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor


def identity(tensors: Sequence[Tensor], facts: ModelFacts) -> Tensor:
    """Return the one tensor unchanged (fuse)."""
    (tensor,) = tensors
    return tensor


def as_list(tensor: Tensor, facts: ModelFacts) -> list[Tensor]:
    """Return the one tensor unchanged, in a list (split)."""
    return [tensor]


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate as `torch.cat` does. For tensors on the meta device, of which only the shapes are
    needed, `torch.cat` would load torch's compiler for 1.5 seconds."""
    import torch

    first = parts[0]
    if not first.is_meta:
        return torch.cat(list(parts), dim=dim)
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return first.new_empty(shape)


def fuse_qkv(tensors: Sequence[Tensor], facts: ModelFacts) -> Tensor:
    """Interleave q [heads * d, ...], k and v [groups * d, ...] to [groups, heads / groups + 2, d,
    ...], flattened: per key-value head its queries, its key, its value. Works on weights and
    biases, whole or cut by heads."""
    query, key, value = tensors
    groups, rest = key.shape[0] // facts.head_dim, key.shape[1:]
    parts = [part.reshape(groups, -1, facts.head_dim, *rest) for part in (query, key, value)]
    return join(parts, dim=1).reshape(-1, *rest)


def split_qkv(tensor: Tensor, facts: ModelFacts) -> list[Tensor]:
    """Invert `fuse_qkv`."""
    per_group, rest = facts.num_query_heads_per_group, tensor.shape[1:]
    grouped = tensor.reshape(-1, per_group + 2, facts.head_dim, *rest)
    return [part.reshape(-1, *rest) for part in grouped.split([per_group, 1, 1], dim=1)]


def concatenate(tensors: Sequence[Tensor], facts: ModelFacts) -> Tensor:
    """Concatenate equal tensors along dim 0: gate, then up."""
    return join(tensors, dim=0)


def halve(tensor: Tensor, facts: ModelFacts) -> list[Tensor]:
    """Invert `concatenate` for two equal tensors."""
    return list(tensor.chunk(2, dim=0))


def swap_columns(tensors: Sequence[Tensor], facts: ModelFacts) -> Tensor:
    """Swap the two halves of dim 1 (fuse), for a projection of two vectors that are concatenated in
    the opposite order."""
    (tensor,) = tensors
    return join(tensor.chunk(2, dim=1)[::-1], dim=1)


def unswap_columns(tensor: Tensor, facts: ModelFacts) -> list[Tensor]:
    """Invert `swap_columns` (split)."""
    return [swap_columns([tensor], facts)]


def split_halves(tensors: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Split one tensor into its two halves along dim 0 (unpack)."""
    (tensor,) = tensors
    return list(tensor.chunk(2, dim=0))


def join_parts(parts: Sequence[Tensor], facts: ModelFacts) -> list[Tensor]:
    """Join parts that are stored one after the other on disk (pack); inverts `split_halves`."""
    return [concatenate(parts, facts)]


def split_cut_parts(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split a tensor into parts that are stored one after the other, each of them cut by tensor
    parallelism. `sizes` are those of the whole parts."""
    cut, rest = divmod(sum(sizes), tensor.shape[0])
    assert not rest, (sizes, tensor.shape)
    return list(tensor.split([size // cut for size in sizes]))


def shapes(*dims: Callable[[ModelFacts], tuple[int, ...]]) -> Shapes:
    """Combine functions into one that returns the shapes of a rule's tensors."""
    return lambda facts: [dim(facts) for dim in dims]
