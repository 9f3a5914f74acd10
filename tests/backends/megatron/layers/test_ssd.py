"""Mamba-2's scan and convolution over packed rows against the recurrence itself, position by
position; values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from milescli.backends.megatron.layers.mamba import convolve, scan

LENGTHS = ([1], [5], [3, 1, 9, 2], [30], [8, 8, 16], [7, 25, 1, 1, 40])


def _sequences(lengths: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def _recurrence(x, decay, b, c, sequence) -> torch.Tensor:
    share = x.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(share, dim=1), c.repeat_interleave(share, dim=1)
    state = torch.zeros(x.shape[1], x.shape[2], b.shape[2], dtype=x.dtype)
    out = []
    for t in range(len(x)):
        if t and sequence[t] != sequence[t - 1]:
            state = torch.zeros_like(state)
        state = decay[t].exp()[:, None, None] * state + x[t][:, :, None] * b[t][:, None, :]
        out.append((state * c[t][:, None, :]).sum(dim=-1))
    return torch.stack(out)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (3, 1)])
def test_the_scan_is_the_recurrence_in_each_sequence(
    lengths: list[int], heads: int, groups: int
) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    length = sum(lengths)
    shapes = ((length, heads, 5), (length, heads), (length, groups, 7), (length, groups, 7))
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    # from hardly any decay to so much that its exponential over a chunk is infinite where it must
    # not be looked at
    given[1] = -torch.logspace(-3, 2, length * heads).view(length, heads)[
        torch.randperm(length, generator=generator)
    ]
    weight = torch.randn(length, heads, 5, generator=generator)
    results = []
    for function, dtype in (
        (lambda *args: scan(*args[:4], sequence=args[4], chunk=8), torch.float32),
        (_recurrence, torch.float64),
    ):
        own = [part.to(dtype).requires_grad_() for part in given]
        out = function(*own, _sequences(lengths))
        gradients = torch.autograd.grad((out * weight.to(dtype)).sum(), own)
        results.append([out.detach().double(), *(each.double() for each in gradients)])
    for result, expected in zip(*results, strict=True):
        assert torch.isfinite(result).all()
        assert (result - expected).abs().max() <= 2e-6 * max(1.0, float(expected.abs().max()))


def test_the_size_of_chunks_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    x, b, c = (torch.randn(70, *shape, generator=generator) for shape in ((4, 3), (2, 6), (2, 6)))
    decay = -torch.rand(70, 4, generator=generator)
    sequence = _sequences([33, 2, 35])
    whole, halves = (scan(x, decay, b, c, sequence=sequence, chunk=size) for size in (128, 9))
    assert torch.allclose(whole, halves, atol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_convolution_sees_its_own_sequence_alone(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((sum(lengths), 3), (3, 4), (3,))
    )
    place = torch.cat([torch.arange(length) for length in lengths])
    expected = [
        F.conv1d(F.pad(part.T, (3, 0))[None], weight[:, None], bias, groups=3)[0].T
        for part in x.split(lengths)
    ]
    assert torch.allclose(convolve(x, weight, bias, place=place), torch.cat(expected), atol=1e-5)
