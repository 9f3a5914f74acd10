"""Softmax over real vocabularies, against float64."""

from __future__ import annotations

import pytest
import torch

from milescli.backends.sglang.inside.cpu import softmax as accurate
from milescli.platform import exact
from milescli.train.vocab_parallel import Head, VocabShard, target_logprobs


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (torch, torch.Tensor):
        for name in ("softmax", "log_softmax"):
            monkeypatch.setattr(owner, name, getattr(owner, name))
    accurate.install()


@pytest.mark.parametrize("vocab_size", [4096, 49_152, 151_936, 262_144])
@pytest.mark.usefixtures("installed")
def test_log_probs_of_a_real_vocabulary_have_no_bias(vocab_size: int) -> None:
    logits = 3 * torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0))
    total = torch.logsumexp(logits.double(), -1, keepdim=True)
    for found in (
        torch.nn.functional.log_softmax(logits, dim=-1),
        torch.log_softmax(logits, dim=1),
        logits.softmax(-1).log(),
    ):
        gap = found.double() - (logits.double() - total)
        # the log of a probability is as exact as the probability, which has 24 bits
        assert abs(gap.mean()) < 1e-6
        assert gap.abs().max() < 4e-6


@pytest.mark.usefixtures("installed")
def test_other_rows_axes_and_types_are_torch_s_own() -> None:
    small, wide = torch.randn(3, 100), torch.randn(5000, 3)
    stock = torch._C._VariableFunctions.softmax
    assert torch.equal(torch.softmax(small, -1), stock(small, -1))
    assert torch.equal(wide.softmax(0), stock(wide, 0))
    assert torch.randn(2, 5000).softmax(-1, dtype=torch.float64).dtype is torch.float64


@pytest.mark.parametrize("vocab_size", [307, 40_001])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_trainer_s_bit_for_bit(
    vocab_size: int, temperature: float, monkeypatch, request
) -> None:
    monkeypatch.setattr(exact, "_is_on", True)
    request.getfixturevalue("installed")
    hidden, weight = torch.randn(60, 72), torch.randn(vocab_size, 72)
    head = Head(hidden=hidden, weight=weight, shard=VocabShard(size=vocab_size))
    targets = torch.randint(0, vocab_size, (60,))
    trained, _ = target_logprobs(head, targets, temperature=temperature)
    logits = head.logits().div_(torch.full((60, 1), temperature))
    sampled = torch.cat([torch.log_softmax(row, dim=-1) for row in logits.split([1, 2, 57])])
    assert torch.equal(sampled.gather(1, targets[:, None])[:, 0], trained)
