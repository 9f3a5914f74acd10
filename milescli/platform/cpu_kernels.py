"""Computes what a small model spends time on besides matrix products, each in one pass over memory:
in C, compiled for this processor. Takes float32 tensors of a CPU, without gradients. Used by
engines and trainers, which use PyTorch's own calls if there is no compiler.

Letters: S or T tokens, H query heads, K key/value heads, D head size, B requests."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from milescli.platform.cpu_kernel_library import load

LANES = 8
"""Attention takes head sizes that are multiples of this."""
_LETTERS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "t": ctypes.c_int}
_ARGUMENTS = {
    "rms_norm": "pipppppiift",
    "rms_norm_backward": "pipippppiiit",
    "swiglu": "ppiit",
    "swiglu_backward": "pppiit",
    "rotate": "piippipfpiiit",
    "attend_slots": "pipppippppiiiiifit",
    "attend_packed": "pipipippppiiiiiift",
    "attend_packed_backward": "pipipipippppppiiiiiift",
}
"""Argument types by function: p pointer, i int64, f float, t int."""
_BLOCK_VALUES = 16_384
"""Number of values in the rows whose gradients of a weight are added up together."""


def is_available() -> bool:
    """Return True if the kernels are usable. The first call compiles them, which takes a second."""
    return load() is not None


def supports(*tensors: torch.Tensor) -> bool:
    """Return True if the kernels are usable and support these tensors."""
    plain = all(x.dtype is torch.float32 and x.device.type == "cpu" for x in tensors)
    return plain and is_available()


@functools.cache
def _function(name: str) -> Callable[..., None]:
    function = getattr(load(), name)
    function.argtypes = [_LETTERS[letter] for letter in _ARGUMENTS[name]]
    function.restype = None
    return function


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normed, x + residual, or x without one), [..., W]: x / sqrt(mean(x^2) + eps) * weight
    (arXiv 1910.07467). Writes the factor of each row to `scales` [rows]."""
    assert _has_c_layout(weight)
    x, stride = _rows(x)
    width = x.shape[-1]
    out, added = torch.empty(x.shape), x
    if residual is not None:
        residual, added = residual.contiguous(), torch.empty(x.shape)
    _function("rms_norm")(
        x.data_ptr(),
        stride,
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        added.data_ptr(),
        out.data_ptr(),
        None if scales is None else scales.data_ptr(),
        x.numel() // width,
        width,
        eps,
        torch.get_num_threads(),
    )
    return out, added


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x [..., W] and of the weight [W]; `scales` is from `rms_norm`."""
    (grad, grad_stride), (x, stride) = _rows(grad), _rows(x)
    width = x.shape[-1]
    rows, block = x.numel() // width, max(_BLOCK_VALUES // width, 1)
    out, parts = torch.empty(x.shape), torch.empty((-(-rows // block), width))
    _function("rms_norm_backward")(
        grad.data_ptr(),
        grad_stride,
        x.data_ptr(),
        stride,
        weight.data_ptr(),
        scales.data_ptr(),
        out.data_ptr(),
        parts.data_ptr(),
        rows,
        width,
        block,
        torch.get_num_threads(),
    )
    return out, parts.sum(dim=0)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Compute silu(first half) * second half, [..., 2 F] -> [..., F]."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width))
    _function("swiglu")(
        x.data_ptr(), out.data_ptr(), out.numel() // width, width, torch.get_num_threads()
    )
    return out


def swiglu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `swiglu`'s argument, [..., 2 F]."""
    grad, x = grad.contiguous(), x.contiguous()
    width, out = grad.shape[-1], torch.empty(x.shape)
    _function("swiglu_backward")(
        grad.data_ptr(),
        x.data_ptr(),
        out.data_ptr(),
        grad.numel() // width,
        width,
        torch.get_num_threads(),
    )
    return out


def rotate(
    x: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    back: bool = False,
) -> torch.Tensor:
    """Rotate x [T, heads, D]: (a, b) -> (a cos - b sin, b cos + a sin) of the halves of each head
    (RoFormer, arXiv 2104.09864, eq. 34, halves instead of neighbours). `cosine` and `sine` are
    [rows, D / 2] with the same row stride; row t, or `positions[t]`, applies to token t. `back`
    inverts the rotation."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    assert len(cosine if positions is None else positions) == len(x)
    assert positions is None or _has_c_layout(positions, torch.int64)
    assert cosine.stride() == sine.stride() and cosine.stride(1) == 1
    tokens, heads, size = x.shape
    out = torch.empty(x.shape)
    _function("rotate")(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cosine.data_ptr(),
        sine.data_ptr(),
        cosine.stride(0),
        None if positions is None else positions.data_ptr(),
        -1.0 if back else 1.0,
        out.data_ptr(),
        tokens,
        heads,
        size // 2,
        torch.get_num_threads(),
    )
    return out


def attend_slots(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    lens: torch.Tensor,
    *,
    longest: int,
    scale: float,
    window: int = 0,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of one new token per request over its context: query [B, H, D], caches
    [slots, K, D] -> [B, H, D]. The bits of a token do not depend on the other tokens. `logs` [H, B]
    receives what `attend_packed` returns for the backward pass. `table` [requests, positions] int32
    holds slots; `requests` [B] int64 are its rows; `lens` [B] int64 are the positions in use, at
    most `longest`. `window` limits them to the last ones; 0 means all."""
    assert _has_c_layout(keys) and _has_c_layout(values)
    assert table.dtype is torch.int32 and table.stride(1) == 1
    assert _has_c_layout(requests, torch.int64) and _has_c_layout(lens, torch.int64)
    assert logs is None or _has_c_layout(logs)
    query, _ = _rows(query.flatten(1))
    groups, size = keys.shape[1:]
    heads = query.shape[1] // size
    out = torch.empty((len(query), heads, size))
    _function("attend_slots")(
        query.data_ptr(),
        query.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        requests.data_ptr(),
        lens.data_ptr(),
        out.data_ptr(),
        None if logs is None else logs.data_ptr(),
        len(query),
        heads,
        groups,
        size,
        longest,
        scale,
        window,
        torch.get_num_threads(),
    )
    return out


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    *,
    longest: int,
    scale: float,
    skips: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute causal attention within each sequence: query [S, H, D], key and value [S, K, D] ->
    [S, H, D], and what the backward pass needs. `starts` [sequences + 1] int32 holds the index at
    which each begins, then S; `skips` [sequences] int32 how many of its first queries are omitted,
    whose output is undefined."""
    assert skips is None or (_has_c_layout(skips, torch.int32) and len(skips) == len(starts) - 1)
    assert _has_c_layout(starts, torch.int32) and int(starts[-1]) == len(query)
    (query, *strides), (key, *more), (value, *rest) = map(_heads, (query, key, value))
    tokens, heads, size = query.shape
    out, logs = torch.empty(query.shape), torch.empty((heads, tokens))
    _function("attend_packed")(
        query.data_ptr(),
        *strides,
        key.data_ptr(),
        *more,
        value.data_ptr(),
        *rest,
        starts.data_ptr(),
        None if skips is None else skips.data_ptr(),
        out.data_ptr(),
        logs.data_ptr(),
        len(starts) - 1,
        tokens,
        heads,
        key.shape[1],
        size,
        longest,
        scale,
        torch.get_num_threads(),
    )
    return out, logs


def attend_packed_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    logs: torch.Tensor,
    *,
    longest: int,
    scale: float,
    skips: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value of `attend_packed`, which returned `logs`;
    undefined for an omitted query."""
    laid = [_heads(x) for x in (grad, query, key, value)]
    (_, tokens), (_, groups, size) = logs.shape, key.shape
    gradients = tuple(torch.empty(x.shape) for x in (query, key, value))
    _function("attend_packed_backward")(
        *(part for x, stride in laid for part in (x.data_ptr(), stride)),
        starts.data_ptr(),
        None if skips is None else skips.data_ptr(),
        logs.data_ptr(),
        *(x.data_ptr() for x in gradients),
        len(starts) - 1,
        tokens,
        query.shape[1],
        groups,
        size,
        longest,
        scale,
        torch.get_num_threads(),
    )
    return gradients


def _has_c_layout(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return True if the memory layout is what C expects."""
    return x.dtype is dtype and x.is_contiguous()


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return [..., W] and the stride of its rows; makes a copy if the strides differ."""
    if not (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)):
        x = x.contiguous()
    return x, x.stride(-2) if x.dim() == 2 else x.shape[-1]


def _heads(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return [S, heads, D] with contiguous heads of a token, and the stride of tokens."""
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        x = x.contiguous()
    return x, x.stride(0)
