"""Computes matrix products of linear layers by oneDNN, which uses the widest vector units of every
vendor. MKL, torch's own choice for float32, uses half as wide ones on other vendors' processors,
and is half as fast if there are wider ones. Under `exact` all products are by oneDNN, whose rows
have the same bits whatever is beside them. Used by engines and trainers on a CPU."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from milescli.platform import exact

MIN_ROWS = 16
"""With fewer rows, the product takes less time than oneDNN's lookup of its kernel."""
MAX_CONVERTED = 1 << 22
"""Weights in bfloat16 that are converted at once: 16 MiB, which the allocator reuses. For a head of
28 million, the memory of all at once costs four times the product of a few rows."""


@functools.cache
def is_wider() -> bool:
    """Return True if this processor has 512-bit vectors; otherwise MKL is as fast or slightly
    faster."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and torch.backends.mkldnn.is_available()


def computes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if `product` uses oneDNN for [..., i] and [o, i]."""
    if x.dtype is not weight.dtype or x.device.type != "cpu":
        return False
    if exact.is_on():
        return x.dtype in (torch.float32, torch.bfloat16)
    return x.dtype is torch.float32 and _is_faster(x)


def _is_faster(x: torch.Tensor) -> bool:
    return x.numel() >= MIN_ROWS * x.shape[-1] and is_wider()


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply [..., i] and [o, i] -> [..., o] like `F.linear`, without autograd."""
    if not computes(x, weight):
        return F.linear(x, weight, bias)
    if exact.is_on():
        return _same_for_every_row(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _same_for_every_row(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute `product` so that the bits of a row of x do not depend on the other rows. oneDNN
    takes another kernel for a single row, so one is added. The bias is added after the product, as
    in Megatron. Factors in bfloat16 are multiplied in float32, and the sums are rounded once:
    oneDNN's own kernels for bfloat16 cut a sum in an order that depends on the number of rows, on a
    processor with AMX, and on that of the threads, on one with AVX-512 alone."""
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return F.linear(x, weight, bias)
    enough = F.pad(rows, (0, 0, 0, 1)) if len(rows) == 1 else rows
    # parts of equal length: of a single column oneDNN has yet another kernel
    num_parts = -(-weight.numel() // MAX_CONVERTED) if x.dtype is torch.bfloat16 else 1
    outs = [
        torch.ops.mkldnn._linear_pointwise(
            enough.float().contiguous(), part.float(), None, "none", [], ""
        ).to(x.dtype)
        for part in weight.tensor_split(num_parts)
    ]
    out = outs[0] if num_parts == 1 else torch.cat(outs, dim=1)
    out = out[: len(rows)].view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a layer's weight, grad.T @ x: [T, o] and [T, i] -> [o, i]. Computes it
    as the weight gradient of a convolution over an image of one row, T wide, channels innermost,
    which has the matrix's memory layout; oneDNN has none for a matrix product."""
    if x.dtype is torch.bfloat16 or not (computes(x, grad) and _is_faster(x)):
        return grad.t() @ x
    weight = x.new_empty((grad.shape[1], x.shape[1], 1, 1))
    _, of_weight, _ = torch.ops.aten.convolution_backward(
        _image(grad.contiguous()),
        _image(x.contiguous()),
        weight,
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        [False, True, False],
    )
    return of_weight.reshape(grad.shape[1], x.shape[1])


def _image(rows: torch.Tensor) -> torch.Tensor:
    """Return [T, channels] as [1, channels, 1, T], in the same memory."""
    return rows[None, None].permute(0, 3, 1, 2)
