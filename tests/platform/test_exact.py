"""The bits of a row do not depend on what is computed beside it, nor on the threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from milescli.core.errors import MachineError
from milescli.platform import cpu_kernels, exact, onednn

BESIDE = (*range(1, 65), 100, 257, 1000)
"""Numbers of rows of one call."""
SOME = (1, 2, 3, 7, 16, 33, 64, 1000)


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (cpu_kernels.is_available() and torch.backends.mkldnn.is_available()):
        pytest.skip("no compiled kernels, or a PyTorch without oneDNN")
    monkeypatch.setattr(exact, "_is_on", True)


def product(width: int, outputs: int) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, bias = torch.randn(outputs, width), torch.randn(outputs)
    return lambda x: onednn.product(x, weight, bias)


def product_in_bfloat16(width: int, outputs: int) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = torch.randn(outputs, width).bfloat16()
    return lambda x: onednn.product(x.bfloat16(), weight)


def norm(x: torch.Tensor) -> torch.Tensor:
    return cpu_kernels.rms_norm(x, torch.linspace(0.5, 2, x.shape[1]), 1e-6)[0]


KERNELS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    **{
        f"product {width} -> {outputs}": (product(width, outputs), width)
        for width, outputs in ((128, 384), (72, 307), (200, 72), (1536, 576), (64, 8), (2048, 40))
    },
    **{
        f"bfloat16 product {width} -> {outputs}": (product_in_bfloat16(width, outputs), width)
        for width, outputs in ((128, 384), (72, 307), (1536, 576), (64, 8), (2048, 40))
    },
    "norm": (norm, 72),
    "swiglu": (cpu_kernels.swiglu, 400),
    "log_total of a small vocabulary": (exact.log_total, 307),
    "log_total of a large vocabulary": (exact.log_total, 40_001),
    "softmax of a router": (lambda x: torch.softmax(x, -1), 12),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_has_the_same_bits_whatever_is_beside_it(name: str) -> None:
    kernel, width = KERNELS[name]
    most = 24 if width > 10_000 else max(BESIDE)
    x, threads = 3 * torch.randn(most + 3, width), torch.get_num_threads()
    expected = kernel(x)
    try:
        for number, beside in ((1, BESIDE), (2, SOME)):
            torch.set_num_threads(number)
            for rows in (rows for rows in beside if rows <= most):
                start = rows % 4
                part = kernel(x[start : start + rows])
                assert torch.equal(part, expected[start : start + rows]), (number, rows)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", [367, 735, 1476, 2664, 4128])
def test_few_rows_of_bfloat16_have_the_bits_of_many(seed: int) -> None:
    """oneDNN has a kernel in bfloat16 for up to 8 rows, whose sums differ once in a million."""
    source = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 64, generator=source).bfloat16()
    x = (3 * torch.randn(1003, 64, generator=source)).bfloat16()
    expected = onednn.product(x, weight)
    for rows in range(1, 20):
        start = rows % 4
        part = onednn.product(x[start : start + rows], weight)
        assert torch.equal(part, expected[start : start + rows]), rows


@pytest.mark.parametrize("shape", [(24,), (0, 24), (1, 24), (2, 24), (3, 7, 24), (1, 1, 24)])
def test_a_product_is_that_of_torch(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(40, 24), torch.randn(40)
    for each in (None, bias):
        torch.testing.assert_close(onednn.product(x, weight, each), F.linear(x, weight, each))
    if x.dim() == 2:
        laid = x.t().contiguous().t()
        assert torch.equal(onednn.product(laid, weight), onednn.product(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_column_has_the_same_bits_wherever_it_lies_in_the_weight(dtype: torch.dtype) -> None:
    """Engines have q, k and v one after the other, and Megatron has them group by group."""
    x, weight = torch.randn(33, 144).to(dtype), torch.randn(216, 144).to(dtype)
    order = torch.randperm(216)
    whole = onednn.product(x, weight)
    assert torch.equal(onednn.product(x, weight[order].contiguous()), whole[:, order])
    assert torch.equal(onednn.product(x, weight[:72].contiguous()), whole[:, :72])


def test_a_head_that_is_converted_in_parts_has_the_bits_of_one_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight = torch.randn(33, 144).bfloat16(), torch.randn(217, 144).bfloat16()
    whole = onednn.product(x, weight)
    torch.testing.assert_close(whole, F.linear(x, weight))
    monkeypatch.setattr(onednn, "MAX_CONVERTED", 216 * 144)  # the rest would be one column
    assert torch.equal(onednn.product(x, weight), whole)


def test_it_is_not_turned_on_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_is_on", False)
    monkeypatch.setattr(cpu_kernels, "is_available", lambda: False)
    with pytest.raises(MachineError, match="needs the compiled kernels"):
        exact.turn_on()
    assert not exact.is_on()
