"""Positions of a row, moved into the cells of the form in which a mixer computes, and back. Used by
every mixer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, kw_only=True)
class Cells:
    """Which position stands in which cell of a form that may have more cells than there are
    positions."""

    position: torch.Tensor
    """[cells] int64; a hole holds some position whose values it may repeat, since nothing real
    looks at it."""
    cell: torch.Tensor
    """[positions] int64, the inverse."""
    holes: torch.Tensor
    """int64, cells without a position."""
    trivial: bool
    """Positions and cells are the same in the same order: nothing needs to be moved."""

    def fill(self, x: torch.Tensor) -> torch.Tensor:
        """[positions, ...] -> [cells, ...]"""
        return x if self.trivial else _Move.apply(x, self.position, self.cell, self.holes[:0])

    def empty(self, x: torch.Tensor) -> torch.Tensor:
        """[cells, ...] -> [positions, ...]"""
        return x if self.trivial else _Move.apply(x, self.cell, self.position, self.holes)


class _Move(torch.autograd.Function):
    """out[i] = x[index[i]] where every row of x that matters occurs once: the gradient is gathered
    too, never added."""

    @staticmethod
    def forward(ctx, x, index, inverse, holes):
        ctx.save_for_backward(inverse, holes)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        inverse, holes = ctx.saved_tensors
        moved = grad.index_select(0, inverse)
        return (moved.index_fill_(0, holes, 0) if holes.numel() else moved), None, None, None
