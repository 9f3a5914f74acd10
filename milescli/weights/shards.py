"""Tensors that are sent in pieces. A trainer rank sends the boxes that it owns; an engine rank gets
`Sharded` tensors, and fetches from the boxes exactly what its own loader reads of them. So no code
describes an engine's sharding: SGLang's loaders do, for any family, fused, padded or repeated.
Knows no vendor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, prod
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

Place = tuple[int, ...]
"""One number for each dim of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangular part of a tensor."""

    start: Place
    """First index along each dim."""
    shape: Place

    @property
    def end(self) -> Place:
        """Return one past the last index along each dim."""
        return tuple(first + length for first, length in zip(self.start, self.shape, strict=True))

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """Return the intersection, or None."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(
            end - first for first, end in zip(start, map(min, self.end, other.end), strict=True)
        )
        return Box(start=start, shape=shape) if all(length > 0 for length in shape) else None

    def along(self, dim: int, first: int, end: int) -> Box:
        """Return the part from `first` to `end` along a dim, counted within the box."""
        start, shape = [*self.start], [*self.shape]
        start[dim] += first
        shape[dim] = end - first
        return Box(start=tuple(start), shape=tuple(shape))

    def within(self, other: Box) -> tuple[slice, ...]:
        """Return the index of this box in a tensor that holds `other`."""
        return tuple(
            slice(first - origin, first - origin + length)
            for first, origin, length in zip(self.start, other.start, self.shape, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """Return the box that is the whole tensor."""
    return Box(start=(0,) * len(shape), shape=tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a Hugging Face tensor that at least one trainer rank holds."""

    name: str
    shape: Place
    """Shape of the whole tensor."""
    dtype: torch.dtype
    box: Box
    owners: tuple[int, ...]
    """Trainer ranks that hold it, ascending."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the box."""
        return self.box.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part, its senders, and on ranks that hold it its numbers."""

    part: Part
    senders: tuple[int, ...]
    """Trainer ranks that send it, one of each group of `assign`."""
    tensor: torch.Tensor | None
    """[*part.box.shape] on ranks that hold the part; None on others."""


Shards = list[Shard]
"""A bucket: boxes that cover whole tensors. Every rank has the same ones in the same order."""
PIECES_OF_BOUND = 16
"""No piece is larger than this fraction of what the busiest rank must send, so that the least
loaded owner ends at no more than 1.2 times that (`tests/weights` checks it over random layouts)."""


def least_busiest(parts: Sequence[Part]) -> float:
    """Return a lower bound of the bytes that the busiest rank sends, however parts are assigned:
    the bytes that only some ranks hold, divided by their number, at its largest."""
    by_owners = defaultdict[tuple[int, ...], int](int)
    for part in parts:
        by_owners[part.owners] += part.size_bytes
    held = {frozenset(owners): size for owners, size in by_owners.items()}
    most = 0.0
    for together in _sharing(held):
        inside = {ranks: size for ranks, size in held.items() if ranks <= together}
        for some in {together, *inside}:
            only = sum(size for ranks, size in inside.items() if ranks <= some)
            most = max(most, only / len(some))
    return most


def _sharing(sets: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    """Return the unions of overlapping sets: the ranks of a pipeline stage."""
    unions: list[frozenset[int]] = []
    for ranks in sets:
        overlapping = [union for union in unions if not union.isdisjoint(ranks)]
        unions = [union for union in unions if union not in overlapping]
        unions.append(ranks.union(*overlapping))
    return unions


def cut_to(
    parts: Sequence[Part], size_bytes: float, block: tuple[int, int] | None = None
) -> list[Part]:
    """Return the parts; those with several owners are cut along their longest dim into pieces of at
    most about `size_bytes`, at multiples of a `block` (rows, columns) if there is one."""
    pieces = list[Part]()
    for part in parts:
        shape = part.box.shape
        dim = max(range(len(shape)), key=lambda dim: shape[dim], default=None)
        if dim is None or len(part.owners) == 1 or part.size_bytes <= size_bytes:
            pieces.append(part)
            continue
        step = 1
        if block is not None:
            step = block[dim - len(shape)] or shape[dim]
        count = min(shape[dim], ceil(part.size_bytes / size_bytes))
        ends = sorted({number * shape[dim] // count // step * step for number in range(count)})
        pieces += [
            replace(part, box=part.box.along(dim, first, end))
            for first, end in pairwise([*ends, shape[dim]])
        ]
    return pieces


def assign(parts: Sequence[Part], *, num_ranks: int) -> list[int]:
    """Return for each part the owner that sends it: the least loaded one, parts with the fewest
    owners and the largest ones first. Every rank computes the same."""
    load = np.zeros(num_ranks, dtype=np.int64)
    senders = [0] * len(parts)
    ranks_of = {part.owners: np.array(part.owners) for part in parts}
    order = sorted(
        range(len(parts)), key=lambda place: (len(parts[place].owners), -parts[place].size_bytes)
    )
    for place in order:
        owners = ranks_of[parts[place].owners]
        owner = owners[load[owners].argmin()]
        load[owner] += parts[place].size_bytes
        senders[place] = int(owner)
    return senders


class Numbers(Protocol):
    """The numbers of a box: a tensor, or an object that reads them from elsewhere when indexed."""

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


class Source:
    """Holds the boxes of one tensor, wherever they are."""

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        boxes: Sequence[tuple[Box, Numbers]],
        *,
        device: torch.device,
    ) -> None:
        """Take boxes with their numbers ([*box.shape] each), which `read` returns on `device`."""
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype
        self.boxes = boxes
        self.device = device
        self.fetched = 0
        """Elements that were read."""

    def read(self, wanted: Box) -> torch.Tensor:
        """Return the numbers of a box: a view if one box of the source has them all. Raises
        ValueError if no box has some number."""
        self.fetched += wanted.num_elements
        if not wanted.num_elements:  # a rank that holds padding alone
            return torch.empty(wanted.shape, dtype=self.dtype, device=self.device)
        found = [
            (common, box, tensor)
            for box, tensor in self.boxes
            if (common := wanted.common(box)) is not None
        ]
        if found and found[0][0] == wanted:
            return found[0][2][wanted.within(found[0][1])].to(self.device)
        if sum(common.num_elements for common, _, _ in found) != wanted.num_elements:
            raise ValueError(f"{self.name}: the shards do not cover {wanted}")
        joined = torch.empty(wanted.shape, dtype=self.dtype, device=self.device)
        for common, box, tensor in found:
            joined[common.within(wanted)].copy_(tensor[common.within(box)])
        return joined


class Recorder(Source):
    """Records which numbers a loader reads, and returns zeros, before the tensor is sent."""

    def __init__(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, device: torch.device
    ) -> None:
        """Stand for a tensor that was not sent yet."""
        super().__init__(name, shape, dtype, [], device=device)
        self.taken = list[Box]()

    def read(self, wanted: Box) -> torch.Tensor:
        """Return zeros."""
        self.taken.append(wanted)
        return torch.zeros(wanted.shape, dtype=self.dtype, device=self.device)


class Sharded(torch.Tensor):
    """Looks like a whole tensor to a loader: its views are views, and the first operation that
    needs numbers fetches only those of that view."""

    source: Source
    on_meta: torch.Tensor

    @staticmethod
    def __new__(cls, source: Source, on_meta: torch.Tensor) -> Sharded:
        """Make a tensor without numbers. `on_meta` is a view of a contiguous tensor of the source's
        shape on the meta device."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            on_meta.shape,
            strides=on_meta.stride(),
            storage_offset=on_meta.storage_offset(),
            dtype=on_meta.dtype,
            device=source.device,
        )
        made.source, made.on_meta = source, on_meta
        return made

    @classmethod
    def of(cls, source: Source) -> Sharded:
        """Return the whole tensor of a source."""
        return cls(source, torch.empty(source.shape, dtype=source.dtype, device="meta"))

    def __repr__(self, **_: object) -> str:
        return f"Sharded({self.source.name}, {list(self.shape)})"

    def __deepcopy__(self, _: dict[int, Any]) -> Sharded:
        """Return the same object: nobody writes into it, so a loader's copy may be the same."""
        return self

    def fetch(self) -> torch.Tensor:
        """Return the numbers of this view."""
        source, view = self.source, self.on_meta
        box, strides = _box_of(view, source.shape)
        numbers = source.read(box)
        if strides is None:
            return numbers.contiguous().as_strided(view.shape, view.stride(), view.storage_offset())
        inner = [0 if dim is None else numbers.stride(dim) for dim in strides]
        return numbers.as_strided(view.shape, inner, numbers.storage_offset())

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(first := args[0], Sharded) and _is_view(func):
            on_meta = func(first.on_meta, *args[1:], **kwargs)
            return tree_map_only(torch.Tensor, lambda view: Sharded(first.source, view), on_meta)
        for value, argument in zip(args, func._schema.arguments, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Sharded):
                raise TypeError(f"{value.source.name}: {func} writes into what was sent")
        args, kwargs = tree_map_only(Sharded, Sharded.fetch, (args, kwargs))
        return func(*args, **kwargs)


def _is_view(func: Any) -> bool:
    """Return True if all results are views of the first argument, in the same dtype."""
    if func is torch.ops.aten.view.dtype:
        return False
    infos = [result.alias_info for result in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _box_of(view: torch.Tensor, shape: Place) -> tuple[Box, list[int | None] | None]:
    """Return the smallest box of a contiguous tensor of `shape` that contains a view of it, and for
    each dim of the view the dim of the box that it runs along (None: along none). If a view is no
    plain slice, the box is the whole tensor, and the dims are None."""
    everything = whole(shape), None
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start, rest = [], view.storage_offset()
    for stride in strides:
        index, rest = divmod(rest, stride) if stride else (0, rest)
        start.append(index)
    lengths = [1] * len(shape)
    along: list[int | None] = []
    for length, stride in zip(view.shape, view.stride(), strict=True):
        if length == 1:
            along.append(None)
            continue
        dims = [dim for dim, each in enumerate(strides) if each == stride and shape[dim] > 1]
        if len(dims) != 1 or lengths[dims[0]] != 1:
            return everything
        lengths[dims[0]] = length
        along.append(dims[0])
    fits = all(
        first + length <= of for first, length, of in zip(start, lengths, shape, strict=True)
    )
    return (Box(start=tuple(start), shape=tuple(lengths)), along) if fits else everything
