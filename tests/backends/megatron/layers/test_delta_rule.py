"""The gated delta rule and its convolution over chunks of packed rows, against the recurrence
itself; values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from milescli.backends.megatron.layers.chunks import make_chunks
from milescli.backends.megatron.layers.gated_delta import causal_conv, gated_delta_rule

LENGTHS = ([1], [5], [3, 1, 9, 2], [130], [64, 64], [7, 25, 1, 90, 40])


def _recurrence(query, key, value, decay, beta, lengths: list[int]) -> torch.Tensor:
    """arXiv 2412.06464, equation 10, position by position."""
    share = value.shape[1] // key.shape[1]
    query, key = query.repeat_interleave(share, dim=1), key.repeat_interleave(share, dim=1)
    out, starts = [], set(np.cumsum([0, *lengths]).tolist())
    for t in range(len(value)):
        if t in starts:
            state = torch.zeros(value.shape[1], key.shape[2], value.shape[2], dtype=value.dtype)
        state = state * decay[t].exp()[:, None, None]
        news = (value[t] - (state * key[t][..., None]).sum(dim=1)) * beta[t][:, None]
        state = state + key[t][..., None] * news[:, None]
        out.append((state * query[t][..., None]).sum(dim=1))
    return torch.stack(out)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("heads", "values"), [(2, 6), (1, 3), (3, 3)])
def test_chunks_compute_the_recurrence_in_each_sequence(
    lengths: list[int], heads: int, values: int
) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    length = sum(lengths)
    shapes = (
        (length, heads, 5),
        (length, heads, 5),
        (length, values, 7),
        (length, values),
        (length, values),
    )
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    given[1] = F.normalize(given[1], dim=-1)
    # from hardly any decay to so much that its inverse over a chunk is infinite
    given[3] = (
        -torch.logspace(-3, 2, length * values)
        .view(length, values)[torch.randperm(length, generator=generator)]
        .double()
    )
    given[4] = given[4].sigmoid()
    weight = torch.randn(length, values, 7, generator=generator, dtype=torch.float64)
    chunks = make_chunks(np.array(lengths), order=None, device=torch.device("cpu"))

    def in_chunks(*parts: torch.Tensor) -> torch.Tensor:
        filled = [chunks.cells.fill(part).unflatten(0, (-1, chunks.size)) for part in parts]
        return chunks.cells.empty(gated_delta_rule(*filled, per_step=chunks.per_step).flatten(0, 1))

    results = []
    for function in (in_chunks, lambda *parts: _recurrence(*parts, lengths)):
        own = [part.clone().requires_grad_() for part in given]
        out = function(*own)
        results.append([out.detach(), *torch.autograd.grad((out * weight).sum(), own)])
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kernel", [1, 3, 4])
def test_the_convolution_sees_its_own_sequence_alone(lengths: list[int], kernel: int) -> None:
    generator = torch.Generator().manual_seed(kernel)
    x = torch.randn(sum(lengths), 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 1, kernel, generator=generator, dtype=torch.float64)
    chunks = make_chunks(np.array(lengths), order=None, device=torch.device("cpu"))

    def in_chunks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        filled = chunks.cells.fill(x).unflatten(0, (-1, chunks.size))
        return chunks.cells.empty(
            causal_conv(filled, weight, per_step=chunks.per_step).flatten(0, 1)
        )

    def one_by_one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = [
            F.conv1d(F.pad(row.t()[None], (kernel - 1, 0)), weight, groups=6)[0].t()
            for row in x.split(lengths)
        ]
        return torch.cat(rows)

    results = []
    for function in (in_chunks, one_by_one):
        own = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = function(*own)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), own)])
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


def test_holes_are_at_most_an_eighth_more_than_need_be() -> None:
    cpu = torch.device("cpu")
    assert make_chunks(np.array([1024, 512]), order=None, device=cpu).size == 64
    assert make_chunks(np.array([17] * 8), order=None, device=cpu).size == 32
    short = make_chunks(np.array([5, 40, 16]), order=None, device=cpu)
    assert (short.size, short.per_step, len(short.cells.position)) == (16, [3, 1, 1], 80)
