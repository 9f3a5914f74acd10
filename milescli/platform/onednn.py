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
    takes other kernels for a single row, and in bfloat16 for up to 8, so rows are added. The bias
    is added after the product, as in Megatron. In bfloat16 PyTorch's own choice is such a kernel,
    even if the processor has no instructions for it."""
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return F.linear(x, weight, bias)
    least = MIN_ROWS if x.dtype is torch.bfloat16 else 2
    enough = F.pad(rows, (0, 0, 0, least - len(rows))) if len(rows) < least else rows
    if x.dtype is torch.bfloat16:
        out = F.linear(enough.contiguous(), weight)
    else:
        out = torch.ops.mkldnn._linear_pointwise(enough.contiguous(), weight, None, "none", [], "")
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
