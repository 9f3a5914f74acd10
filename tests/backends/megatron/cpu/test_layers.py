"""The forms that a CPU computes faster give what the plain formulas give, gradients included."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from milescli.backends.megatron import cpu_compat
from milescli.backends.megatron.cpu.kernels import CpuRmsNorm, ShortAttention
from milescli.backends.megatron.cpu.linear import differentiable

if torch.cuda.is_available():
    pytest.skip("these layers are for machines without an accelerator", allow_module_level=True)
cpu_compat.install()


def compare(ours, plain, *inputs: torch.Tensor) -> None:
    """Values and gradients of both for a random gradient of the result."""
    results = []
    for function in (ours, plain):
        leaves = [value.clone().requires_grad_() for value in inputs]
        out = function(*leaves)
        generator = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=generator))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7, 24), (1500, 1, 96)])
def test_linear_is_a_matrix_differentiable(shape: tuple[int, ...]) -> None:
    weight = torch.randn(40, shape[-1])
    compare(lambda x, w: differentiable(x, w), F.linear, torch.randn(shape), weight)


def test_linear_takes_a_gradient_that_does_not_lie_in_rows() -> None:
    x, weight = torch.randn(64, 8), torch.randn(12, 8)
    compare(lambda x, w: differentiable(x, w).t(), lambda x, w: F.linear(x, w).t(), x, weight)


def test_what_comes_out_may_be_added_to_in_place() -> None:
    x, weight = torch.randn(32, 2, 8), torch.randn(4, 8)
    compare(
        lambda x, w: differentiable(CpuRmsNorm.apply(x, w[0], 1e-6).add_(1), w).add_(1),
        lambda x, w: F.linear(F.rms_norm(x, (8,), w[0], 1e-6) + 1, w) + 1,
        x,
        weight,
    )


@pytest.mark.parametrize("shape", [(0, 8), (5, 16), (3000, 2, 64), (2500, 1, 128)])
def test_norm_is_rms_norm(shape: tuple[int, ...]) -> None:
    compare(
        lambda x, w: CpuRmsNorm.apply(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, (shape[-1],), w, 1e-6),
        torch.randn(shape),
        torch.randn(shape[-1]),
    )


def test_norm_takes_rows_with_gaps_between_them() -> None:
    wide = torch.randn(40, 3, 20)
    compare(
        lambda x, w: CpuRmsNorm.apply(x[..., 4:16], w, 1e-6),
        lambda x, w: F.rms_norm(x[..., 4:16], (12,), w, 1e-6),
        wide,
        torch.randn(12),
    )


@pytest.mark.parametrize("shape", [(0, 1, 6), (4, 10), (900, 1, 512)])
def test_swiglu_is_silu_of_one_half_times_the_other(shape: tuple[int, ...]) -> None:
    from milescli.backends.megatron.cpu.swiglu import SwiGlu

    compare(
        SwiGlu.apply,
        lambda x: F.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1],
        torch.randn(shape),
    )


@pytest.mark.parametrize("lengths", [[1], [7, 40, 1, 33], [128, 3], [40] * 30])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 32), (3, 3, 16), (6, 1, 8)])
def test_short_attention_is_causal_attention_within_each_sequence(
    lengths: list[int], heads: int, groups: int, size: int
) -> None:
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)

    def plain(query, key, value):
        outs = []
        for parts in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in parts)
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=0.3, enable_gqa=True
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    compare(
        lambda *parts: ShortAttention.apply(*parts, starts, max(lengths), 0.3),
        plain,
        torch.randn(sum(lengths), heads, size),
        torch.randn(sum(lengths), groups, size),
        torch.randn(sum(lengths), groups, size),
    )


@pytest.mark.parametrize("skips", [[0, 5, 32, 0], [7, 40, 1, 33], [0, 0, 0, 0]])
def test_short_attention_leaves_the_first_queries_of_a_sequence_out(skips: list[int]) -> None:
    lengths = [7, 40, 1, 33]
    skips = [min(pair) for pair in zip(skips, lengths, strict=True)]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    places = torch.cat([torch.arange(length) for length in lengths])
    first = torch.tensor(skips).repeat_interleave(torch.tensor(lengths))
    kept = (places >= first).nonzero()[:, 0]

    def attend(left_out: torch.Tensor | None):
        def own(query, key, value):
            whole = torch.zeros(sum(lengths), 4, 16).index_copy(0, kept, query)
            out = ShortAttention.apply(whole, key, value, starts, max(lengths), 0.3, left_out)
            return out[kept]

        return own

    compare(
        attend(torch.tensor(skips, dtype=torch.int32)),
        attend(None),
        torch.randn(len(kept), 4, 16),
        torch.randn(sum(lengths), 2, 16),
        torch.randn(sum(lengths), 2, 16),
    )
