"""Attention block by block and capped logits against the same written out in full, forward and
backward. Plain tensors; no ranks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from milescli.backends.megatron.layers import attention
from milescli.backends.megatron.layers.blockwise import attend, make_blocks
from milescli.backends.megatron.step.rows import RowShape, zigzag


def _written_out(query, key, value, sinks, *, places, window, scale, softcap):
    """[N, Q, heads, d], ... with the whole matrix of logits."""
    per_group = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(per_group, dim=2), value.repeat_interleave(per_group, dim=2)
    logits = torch.einsum("nqhd,nkhd->nhqk", query, key) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    keys, last = torch.arange(key.shape[1]), torch.from_numpy(places)[:, None, :, None]
    seen = (keys <= last) & (keys > last - (window or key.shape[1]))
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        extra = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, extra], dim=-1)
    weights = logits.softmax(dim=-1)[..., : key.shape[1]]
    return torch.einsum("nhqk,nkhd->nqhd", weights, value)


@pytest.mark.parametrize("window", [0, 1, 7, 80])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("cp", [1, 2])
def test_blocks_give_what_the_whole_matrix_gives(
    window: int, sinks: bool, softcap: float | None, cp: int
) -> None:
    generator = torch.Generator().manual_seed(window)
    num_keys, num_sequences = 600, 2
    places = np.stack([zigzag([num_keys], cp=cp, cp_rank=0)] * num_sequences)
    places[1, -4:] = 0  # holes behind a sequence that is shorter
    shapes = [(places.shape[1], 6, 4), (num_keys, 2, 4), (num_keys, 2, 3)]
    tensors = [torch.randn(num_sequences, *shape, generator=generator) for shape in shapes]
    tensors.append(torch.randn(6, generator=generator) if sinks else None)
    grad = torch.randn(num_sequences, places.shape[1], 6, 3, generator=generator)
    blocks = make_blocks(places, num_keys=num_keys, window=window, device=torch.device("cpu"))

    def run(call):
        leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in tensors]
        out = call(*leaves)
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]

    ours = run(lambda *given: attend(*given, blocks=blocks, scale=0.7, softcap=softcap))
    theirs = run(
        lambda *given: _written_out(
            *given, places=places, window=window, scale=0.7, softcap=softcap
        )
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_a_window_looks_at_its_own_keys_only() -> None:
    places = np.arange(1000)[None]
    blocks = make_blocks(places, num_keys=1000, window=64, device=torch.device("cpu"))
    assert max(block.keys.stop - block.keys.start for block in blocks) <= 127


def test_blocks_hold_no_square() -> None:
    places = np.stack([zigzag([4096], cp=2, cp_rank=1)] * 3)
    held = sum(
        tensor.numel()
        for block in make_blocks(places, num_keys=4096, window=0, device=torch.device("cpu"))
        for tensor in (block.first, block.last)
        if tensor is not None
    )
    assert held == 2048


def _attended(cp: int) -> list[torch.Tensor]:
    """The answer of plain attention and its gradients, over sequences of two lengths."""
    shape = RowShape(cp=cp, cp_rank=cp - 1)
    grid = attention._grid(np.array([96, 128]), shape=shape, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(cp)
    sizes = [(2, grid.shape[1], 4, 8), (2, grid.shape[2], 2, 8), (2, grid.shape[2], 2, 8)]
    given = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    layer = SimpleNamespace(window=0, softmax_offset=None, softcap=None, scale=0.4)
    layer._is_plain = partial(attention.PackedAttention._is_plain, layer)
    out = attention.PackedAttention._attend(layer, *given, grid=grid)  # type: ignore[arg-type]
    out.square().sum().backward()
    return [out.detach(), *(each.grad for each in given)]


@pytest.mark.parametrize("cp", [1, 2])
def test_without_a_kernel_the_answer_is_the_same(cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernel = _attended(cp)
    monkeypatch.setattr(attention, "has_kernel", lambda *_, **__: False)
    for one, other in zip(_attended(cp), with_kernel, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_a_mask_is_never_given_to_a_device() -> None:
    shape = RowShape(cp=2, cp_rank=0)
    grid = attention._grid(np.array([128]), shape=shape, device=torch.device("meta"))
    assert grid.mask is None and not grid.is_causal
    query, key = torch.zeros(1, 64, 4, 8, device="meta"), torch.zeros(1, 128, 4, 8, device="meta")
    assert not attention.has_kernel(query, key, grid=grid)


def test_cudnn_can_be_left_out() -> None:
    was = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        attention.avoid_cudnn()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)
