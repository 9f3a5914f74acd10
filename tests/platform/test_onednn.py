"""Products by oneDNN are those of torch, whatever this processor would choose by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from milescli.platform import onednn


@pytest.fixture(params=[True, False], ids=["wide vectors", "narrow vectors"])
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(onednn, "is_wider", lambda: request.param)
    return request.param


@pytest.mark.parametrize("shape", [(1, 24), (onednn.MIN_ROWS, 24), (3, 7, 24), (1500, 1, 96)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_that_of_torch(wide: bool, shape: tuple[int, ...], with_bias: bool) -> None:
    x, weight = torch.randn(shape), torch.randn(40, shape[-1])
    bias = torch.randn(40) if with_bias else None
    torch.testing.assert_close(
        onednn.product(x, weight, bias), F.linear(x, weight, bias), atol=1e-4, rtol=1e-4
    )


def test_factors_may_lie_as_they_like(wide: bool) -> None:
    x, weight = torch.randn(24, 64).t(), torch.randn(24, 40).t()
    torch.testing.assert_close(onednn.product(x, weight), F.linear(x, weight), atol=1e-4, rtol=1e-4)


def test_it_computes_many_rows_of_float32_on_wide_vectors(wide: bool) -> None:
    weight = torch.randn(4, 8)
    assert onednn.computes(torch.randn(2, 8, 8), weight) is wide
    assert not onednn.computes(torch.randn(onednn.MIN_ROWS - 1, 8), weight)
    assert not onednn.computes(torch.randn(64, 8).bfloat16(), weight.bfloat16())
    assert not onednn.computes(torch.randn(64, 8), weight.double())
