"""The positions of a packed row whose sequences are cut into chunks (the form in which recurrent
layers compute), and the moves between row and chunks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(slots=True, kw_only=True)
class Cells:
    """Maps positions to the cells of a layout, which may have more cells than there are
    positions."""

    position: torch.Tensor
    """[cells] int64, the position in each cell; a hole has any position, since its values are never
    used."""
    cell: torch.Tensor
    """[positions] int64, the inverse."""
    holes: torch.Tensor
    """int64, cells without a position."""
    trivial: bool
    """True if positions and cells are the same in the same order, so that nothing needs to be
    moved."""
    bags: tuple[torch.Tensor, torch.Tensor] | None = None
    """If a position has several cells that are read: (cells of the first position, of the second,
    ..., int64; where those of each position begin, [positions] int64)."""

    def fill(self, x: torch.Tensor) -> torch.Tensor:
        """Scatter [positions, ...] -> [cells, ...]."""
        if self.bags is not None:
            return _Repeat.apply(x, self.position, *self.bags)
        return self.gather(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Scatter as `fill`, if only the first cell of each position has a gradient."""
        return x if self.trivial else _Move.apply(x, self.position, self.cell, self.holes[:0])

    def empty(self, x: torch.Tensor) -> torch.Tensor:
        """Gather [cells, ...] -> [positions, ...]."""
        return x if self.trivial else _Move.apply(x, self.cell, self.position, self.holes)


class _Move(torch.autograd.Function):
    """Computes out[i] = x[index[i]], in which every relevant row of x occurs once: the gradient is
    gathered too, never added."""

    @staticmethod
    def forward(ctx, x, index, inverse, holes):
        ctx.save_for_backward(inverse, holes)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        inverse, holes = ctx.saved_tensors
        moved = grad.index_select(0, inverse)
        return (moved.index_fill_(0, holes, 0) if holes.numel() else moved), None, None, None


class _Repeat(torch.autograd.Function):
    """Computes out[i] = x[index[i]]; the gradient of a row of x is the sum over its bag."""

    @staticmethod
    def forward(ctx, x, index, members, starts):
        ctx.save_for_backward(members, starts)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        members, starts = ctx.saved_tensors
        rows = grad.reshape(len(grad), -1)
        summed = F.embedding_bag(members, rows, starts, mode="sum")
        return summed.view(-1, *grad.shape[1:]), None, None, None


_SIZES = (64, 32, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Arranges sequences in chunks in the order of time. F: positions of the whole row. The first
    chunks of all sequences come first, the longest sequence first, then the second chunks, and so
    on, so that a step of the recurrence is one slice."""

    size: int
    """Positions in a chunk, T."""
    per_step: list[int]
    """[steps] number of sequences that have that many chunks; descending."""
    cells: Cells
    """Cells of the chunks end to end, [chunks * T]. Holes come after the end of their sequence."""


def make_chunks(lengths: np.ndarray, *, order: np.ndarray | None, device: torch.device) -> Chunks:
    """Make the chunks of a row in which sequences of `lengths` [sequences] lie end to end; `order`
    [F] says where each position is stored (None: in place)."""
    size = _best_size(lengths)
    counts = -(-lengths // size)
    longest_first = np.argsort(-counts, kind="stable")
    lengths, counts = lengths[longest_first], counts[longest_first]
    starts = np.concatenate([[0], np.cumsum(lengths[np.argsort(longest_first)])[:-1]])[
        longest_first
    ]
    per_step = [int((counts > step).sum()) for step in range(int(counts[0]))]
    first = np.concatenate([starts[:active] + size * step for step, active in enumerate(per_step)])
    left = np.concatenate([lengths[:active] - size * step for step, active in enumerate(per_step)])
    place = np.arange(size)[None, :]
    real = (place < left[:, None]).reshape(-1)
    position = np.where(real, (first[:, None] + place).reshape(-1), 0)
    if order is not None:
        position = order[position]
    cell = np.empty(int(lengths.sum()), np.int64)
    cell[position[real]] = np.flatnonzero(real)
    tensors = [
        torch.from_numpy(array).to(device) for array in (position, cell, np.flatnonzero(~real))
    ]
    cells = Cells(position=tensors[0], cell=tensors[1], holes=tensors[2], trivial=False)
    return Chunks(size=size, per_step=per_step, cells=cells)


def _best_size(lengths: np.ndarray) -> int:
    """Return the largest size that fills at most an eighth more cells than the smallest one: fewer
    steps, larger products."""
    cells = {size: int((-(-lengths // size) * size).sum()) for size in _SIZES}
    return next(size for size in _SIZES if cells[size] <= 1.125 * cells[_SIZES[-1]])
