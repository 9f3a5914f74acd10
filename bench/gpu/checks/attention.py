"""The trainer's attention over a packed row on this device: against float64, against each sequence
alone, by which kernel, and how fast. Called by `numerics`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from lines import Bound, Line

from checks.kernels import kernel_of, row_seconds
from checks.one_layer import BF16, BF16_GRADIENT, FP32, OneLayer, apart, worst

LENGTHS = (2048, 1531, 1100, 777, 300, 64, 3)
LENGTHS_ON_CPU = (40, 27, 9, 3)


def measure(rank: OneLayer) -> Iterator[Line]:
    """Lines of `numerics`."""
    lengths = LENGTHS if rank.visit.on_device else LENGTHS_ON_CPU
    bounds = {torch.bfloat16: (BF16, BF16_GRADIENT), torch.float32: (FP32, FP32)}
    for dtype, (most, most_of_gradient) in bounds.items():
        suffix = "bf16" if dtype is torch.bfloat16 else "fp32"
        row = rank.row(lengths)
        inputs = rank.heads(sum(lengths), dtype)
        out = rank.attend(*inputs, row)
        upstream = torch.randn_like(out)
        gradients = torch.autograd.grad(out, inputs, upstream)
        wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
        expected = _attention64(*wide, row, lengths)
        expected_gradients = torch.autograd.grad(expected, wide, upstream.double())
        kernels = [kernel_of(grid, inputs) for grid in row.grids]
        yield Line(
            name=f"attention_{suffix}",
            measured=apart(out, expected),
            unit="relative error",
            bound=Bound(kind="at most", value=most),
            note=f"row of {list(lengths)}; kernels: {', '.join(dict.fromkeys(kernels))}",
        )
        parts = {
            name: apart(mine, reference)
            for name, mine, reference in zip(
                ("query", "key", "value"), gradients, expected_gradients, strict=True
            )
        }
        yield Line(
            name=f"attention_gradient_{suffix}",
            measured=worst(parts),
            unit="relative error",
            bound=Bound(kind="at most", value=most_of_gradient),
            figures=parts,
        )
        if dtype is torch.bfloat16:
            del wide, expected, expected_gradients
            yield _packed_row(rank, inputs, out, upstream, gradients, lengths)
            yield _plain_kernels(kernels)
            yield _attention_speed(rank)


def _attention64(query, key, value, row, lengths: Sequence[int]) -> torch.Tensor:
    """Sequence by sequence, written out; rotated by the row's own angles, which `rotation`
    looks at."""
    angles = row.angles["full"]
    query, key = _rotate64(query, angles), _rotate64(key, angles)
    shared = query.shape[1] // key.shape[1]
    parts, start = [], 0
    for length in lengths:
        here = slice(start, start + length)
        q, k, v = (
            tensor[here].repeat_interleave(times, dim=1).transpose(0, 1)
            for tensor, times in ((query, 1), (key, shared), (value, shared))
        )
        logits = q @ k.mT / query.shape[-1] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        parts.append((logits.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(parts).flatten(1)


def _rotate64(x: torch.Tensor, angles) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos.double(), angles.sin.double()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _packed_row(rank: OneLayer, inputs, out, upstream, gradients, lengths: Sequence[int]) -> Line:
    """The same module, given each sequence alone."""
    outs, alone_gradients, start = [], [], 0
    for length in lengths:
        here = slice(start, start + length)
        alone = [tensor.detach()[here].requires_grad_() for tensor in inputs]
        outs.append(rank.attend(*alone, rank.row([length])))
        alone_gradients.append(torch.autograd.grad(outs[-1], alone, upstream[here]))
        start += length
    parts = {"forward": apart(out, torch.cat(outs))}
    for name, mine, single in zip(
        ("query", "key", "value"), gradients, zip(*alone_gradients, strict=True), strict=True
    ):
        parts[name] = apart(mine, torch.cat(single))
    return Line(
        name="packed_row_bf16",
        measured=worst(parts),
        unit="relative error",
        bound=Bound(kind="at most", value=BF16),
        note="a row of sequences against each of them alone, by the same module",
        figures=parts,
    )


def _plain_kernels(kernels: Sequence[str]) -> Line:
    """PyTorch's plain way holds [heads, Q, K] in memory; block by block is slow."""
    return Line(
        name="kernels",
        measured=float(sum(kernel in ("math", "blockwise") for kernel in kernels)),
        predicted=0.0,
        unit="grids that no fused kernel computes",
        bound=Bound(kind="equal", anywhere=False),
        note=", ".join(kernels),
    )


def _attention_speed(rank: OneLayer) -> Line:
    """As in a step: rows whose lengths nobody has seen before."""
    rng = np.random.default_rng()
    low, high, total = (512, 2048, 16_384) if rank.visit.on_device else (16, 64, 256)
    rows = []
    for _ in range(3):
        lengths: list[int] = []
        while sum(lengths) < total:
            lengths.append(min(int(rng.integers(low, high)), total - sum(lengths)))
        rows.append((lengths, rank.row(lengths)))
    inputs = rank.heads(total, torch.bfloat16)
    figures = row_seconds(rank.attend, inputs, rows, rank.visit)
    flops = 3.5 * sum(2 * rank.facts.num_heads * rank.facts.head_dim * n * n for n in rows[-1][0])
    return Line(
        name="attention_speed",
        measured=flops / figures["seconds"] / 1e12,
        unit="TFLOP/s",
        note=f"forward and backward of a row of {total} tokens; new_shape_s: at first sight of its "
        "lengths; cudnn_s: with cuDNN's kernel allowed; varlen_s: PyTorch's flash kernel over the "
        "row as it lies",
        figures=figures,
    )
