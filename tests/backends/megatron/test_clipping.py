"""Norm and scaling of all gradients at once, beside Megatron's own, one by one."""

from __future__ import annotations

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads

from milescli.backends.megatron import clipping


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), (2, 4, 1), (1,))]


def test_the_norm_is_that_of_all_numbers_together() -> None:
    first, second = gradients(), gradients()[:2]
    (norm,), per_tensor = clipping.norm_of_all(65536, torch.zeros(1), [first, second], False)
    numbers = torch.cat([tensor.flatten() for tensor in (*first, *second)])
    assert per_tensor is None
    assert float(norm) == pytest.approx(float(numbers.double().norm()), rel=1e-6)


def test_scaling_is_megatrons_own_in_place_and_into_others() -> None:
    ours, theirs = gradients(), gradients()
    clipping.scale_all(65536, torch.zeros(1), [ours, ours], 0.3)
    utils.local_multi_tensor_scale(65536, torch.zeros(1), [theirs, theirs], 0.3)
    for mine, own in zip(ours, theirs, strict=True):
        assert torch.equal(mine, own)
    source, target = gradients(), [torch.full_like(tensor, torch.nan) for tensor in gradients()]
    clipping.scale_all(65536, torch.zeros(1), [source, target], 0.3)
    for mine, own, given in zip(target, theirs, source, strict=True):
        assert torch.equal(mine, own) and not torch.equal(given, own)


def test_only_megatrons_replacements_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: object) -> None: ...

    monkeypatch.setattr(clip_grads, "l2_norm_impl", compiled)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", compiled)
    clipping.install()
    assert clip_grads.l2_norm_impl is clip_grads.multi_tensor_scale_impl is compiled
    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    clipping.install()
    assert clip_grads.l2_norm_impl is clipping.norm_of_all
