"""The distance between policy and teacher beside its formula, in float64 and plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from milescli.recipe.distill import Distill, teachers_by_source
from milescli.train.objectives.supervised import divergence
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream
from tests.train.tokens import one_sequence

VOCAB = 30


def _distributions(seed: int, *, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[8, VOCAB] log-probs of policy and teacher."""
    generator = torch.Generator().manual_seed(seed)
    policy, teacher = spread * torch.randn(2, 8, VOCAB, generator=generator, dtype=torch.float64)
    return policy.log_softmax(-1), teacher.log_softmax(-1)


def _tokens(own: torch.Tensor, teacher: torch.Tensor, top_k: int) -> PackedTokens:
    best = teacher.topk(top_k, dim=1)
    made = one_sequence(own[:, 0].float(), streams={Stream.TEACHER: best.values.float()})
    return replace(made, candidates=own.gather(1, best.indices))


@pytest.mark.parametrize("kl", ["reverse", "forward"])
@pytest.mark.parametrize("seed", range(3))
def test_of_all_tokens_but_one_it_is_the_kl_and_so_is_its_gradient(kl: str, seed: int) -> None:
    own, teacher = _distributions(seed, spread=0.7)
    expected_in, found_in = own.clone().requires_grad_(), own.clone().requires_grad_()
    log_p, log_q = (expected_in, teacher) if kl == "reverse" else (teacher, expected_in)
    expected = (log_p.exp() * (log_p - log_q)).sum(1)
    settings = Distill(kl=kl, top_k=VOCAB - 1)
    found = divergence(_tokens(found_in, teacher, VOCAB - 1), settings)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # of the last token, the rest's probability moves with the others'
    last = teacher.argmin(1, keepdim=True)
    share = expected_in.exp().detach() / expected_in.gather(1, last).exp().detach()
    expected.sum().backward()
    slope = expected_in.grad - share * expected_in.grad.gather(1, last)
    slope = slope.scatter(1, last, 0.0)
    found.sum().backward()
    torch.testing.assert_close(found_in.grad, slope, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kl", ["reverse", "forward"])
@pytest.mark.parametrize("top_k", [1, 5, VOCAB])
def test_it_is_finite_not_negative_and_0_where_both_say_the_same(kl: str, top_k: int) -> None:
    own, teacher = _distributions(7, spread=20.0)
    leaf = own.clone().requires_grad_()
    apart = divergence(_tokens(leaf, teacher, top_k), Distill(kl=kl, top_k=top_k))
    apart.sum().backward()
    assert torch.isfinite(leaf.grad).all()
    assert (apart > -1e-6).all() and apart.max() > 0.1
    same = divergence(_tokens(teacher, teacher, top_k), Distill(kl=kl, top_k=top_k))
    torch.testing.assert_close(same, torch.zeros_like(same), atol=1e-5, rtol=0)


def test_each_source_has_its_teacher() -> None:
    teachers = [{"path": "a", "sources": ["x", "y"]}, {"path": "b", "sources": ["z"]}]
    settings = Distill.model_validate({"teachers": teachers})
    assert teachers_by_source(settings) == {"x": 0, "y": 0, "z": 1}
    assert teachers_by_source(Distill.model_validate({"teachers": [{"path": "a"}]})) == {}
