"""The trainer's attention under `exact`: each query has the bits that an engine gives it, and the
gradients are those of PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from milescli.backends.megatron.cpu.kernels import ShortAttention, is_for
from milescli.platform import cpu_kernels, exact

LENGTHS = (1, 2, 3, 17, 64, 65, 200)


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_kernels.is_available():
        pytest.skip("no compiled kernels")
    monkeypatch.setattr(exact, "_is_on", True)


def row(heads: int, groups: int, size: int) -> tuple[torch.Tensor, ...]:
    """(query, key, value, starts), the first with a gradient; parts of one tensor."""
    tokens = sum(LENGTHS)
    mixed = torch.randn(tokens, heads + 2 * groups, size).requires_grad_()
    starts = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return *mixed.split([heads, groups, groups], dim=1), starts


@pytest.mark.parametrize("shape", [(6, 2, 24), (4, 4, 64), (3, 1, 128), (9, 3, 8)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_query_has_the_bits_of_a_decode(shape, threads: int) -> None:
    query, key, value, starts = row(*shape)
    assert is_for(query, max(LENGTHS))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = ShortAttention.apply(query, key, value, starts, max(LENGTHS), 0.2)
    finally:
        torch.set_num_threads(before)
    slots = torch.randperm(4 * len(query))[: len(query)]
    caches = [torch.randn(4 * len(query), *shape[1:]) for _ in range(2)]
    for cache, rows in zip(caches, (key, value), strict=True):
        cache[slots] = rows.detach()
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        for token in {start, (start + end) // 2, end - 1}:
            decoded = cpu_kernels.attend_slots(
                query[token : token + 1].detach(),
                *caches,
                slots[None, start:end].int(),
                torch.zeros(1, dtype=torch.int64),
                torch.tensor([token - start + 1]),
                longest=end - start,
                scale=0.2,
            )
            assert torch.equal(decoded[0], out[token]), token


@pytest.mark.parametrize("shape", [(6, 2, 24), (3, 1, 128)])
def test_values_and_gradients_are_those_of_torch(shape) -> None:
    query, key, value, starts = row(*shape)
    out = ShortAttention.apply(query, key, value, starts, max(LENGTHS), 0.2)
    weights = torch.randn_like(out)
    own = torch.autograd.grad((out * weights).sum(), (query, key, value), retain_graph=True)
    parts = [
        F.scaled_dot_product_attention(
            *(x[None, start:end].transpose(1, 2) for x in (query, key, value)),
            is_causal=True,
            scale=0.2,
            enable_gqa=True,
        ).transpose(1, 2)[0]
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    theirs = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    for mine, other in zip(own, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
