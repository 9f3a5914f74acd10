"""The compiled kernels against the plain formulas. Those with a gradient of their own, and those of
a cache of slots, are tested where they are used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from milescli.platform import cpu_kernels

pytestmark = pytest.mark.slow  # imports torch

HEADS, SIZE = 3, 8


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 8), (5, 33), (700, 64)])
def test_a_residual_is_added_before_the_norm(shape: tuple[int, int]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    normed, added = cpu_kernels.rms_norm(x, weight, 1e-6, residual=residual)
    torch.testing.assert_close(added, x + residual)
    torch.testing.assert_close(normed, F.rms_norm(x + residual, shape[1:], weight, 1e-6))


def test_rows_may_have_gaps_between_them() -> None:
    wide, weight = torch.randn(50, 40), torch.randn(16)
    normed, _ = cpu_kernels.rms_norm(wide[:, 8:24], weight, 1e-6)
    torch.testing.assert_close(normed, F.rms_norm(wide[:, 8:24], (16,), weight, 1e-6))


def test_gates_of_any_size_are_finite_and_what_is_none_stays_so() -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -1.0, 0.0, 1.0, 88.0, 1e30, float("nan")]])
    out = cpu_kernels.swiglu(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    torch.testing.assert_close(out, F.silu(gate), equal_nan=True, atol=1e-8, rtol=2e-6)


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The halves of each head are real and imaginary parts."""
    real, imaginary = x.double().chunk(2, dim=-1)
    result = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((result.real, result.imag), dim=-1).float()


def test_a_head_is_turned_by_its_position_and_back() -> None:
    positions = torch.tensor([0, 3, 1, 3, 30])
    angles = torch.outer(torch.arange(31), 10.0 ** -torch.arange(SIZE // 2).double())
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    cosine, sine = table.chunk(2, dim=-1)
    wide = torch.randn(5, 2 * HEADS * SIZE)
    x = wide[:, HEADS * SIZE :].view(5, HEADS, SIZE)
    got = cpu_kernels.rotate(x, cosine, sine, positions=positions)
    torch.testing.assert_close(got, turned(x, angles[positions]))
    there = cpu_kernels.rotate(x, cosine[positions], sine[positions])
    torch.testing.assert_close(there, got)
    back = cpu_kernels.rotate(got, cosine, sine, positions=positions, back=True)
    torch.testing.assert_close(back, x)


def test_the_same_bits_come_with_any_number_of_threads() -> None:
    x, weight, grad = torch.randn(9000, 32), torch.randn(32), torch.randn(9000, 32)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        scales = torch.empty(9000)
        cpu_kernels.rms_norm(x, weight, 1e-6, scales=scales)
        results.append(cpu_kernels.rms_norm_backward(grad, x, weight, scales))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_other_types_are_for_others() -> None:
    assert cpu_kernels.supports(torch.zeros(1))
    assert not cpu_kernels.supports(torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16))
    assert not cpu_kernels.supports(torch.zeros(1, device="meta"))
