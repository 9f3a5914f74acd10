"""Experts under `exact`: a token has the same bits whatever is beside it, and the value is that of
the formula."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from milescli.backends.sglang.inside.cpu.layers import experts_in_order
from milescli.platform import cpu_kernels, exact

EXPERTS, HIDDEN, INNER, CHOSEN = 12, 72, 40, 3
SILU = SimpleNamespace(activation="silu")


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_kernels.is_available():
        pytest.skip("no compiled kernels")
    monkeypatch.setattr(exact, "_is_on", True)


def test_a_token_has_the_same_bits_whatever_is_beside_it() -> None:
    layer = SimpleNamespace(
        w13_weight=torch.randn(EXPERTS, 2 * INNER, HIDDEN),
        w2_weight=torch.randn(EXPERTS, HIDDEN, INNER),
    )
    x = torch.randn(64, HIDDEN)
    weights, ids = torch.randn(64, EXPERTS).softmax(-1).topk(CHOSEN)
    both = experts_in_order(layer, x, (weights, ids.int(), None), SILU)
    for rows in (1, 2, 3, 17, 63):
        for start in (0, 1, 64 - rows):
            part = slice(start, start + rows)
            routes = (weights[part], ids[part].int(), None)
            assert torch.equal(experts_in_order(layer, x[part], routes, SILU), both[part]), rows
    expected = torch.zeros_like(x)
    for token, place in ((token, place) for token in range(64) for place in range(CHOSEN)):
        expert = ids[token, place]
        gate, up = (layer.w13_weight[expert] @ x[token]).chunk(2)
        inner = F.silu(gate) * up
        expected[token] += weights[token, place] * (layer.w2_weight[expert] @ inner)
    torch.testing.assert_close(both, expected, atol=1e-3, rtol=1e-4)
