"""Log-probs, entropy and their gradients against torch's own log_softmax, whole and over ranks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from milescli.train import vocab_parallel
from milescli.train.vocab_parallel import VocabShard, target_logprobs, top_logprobs


def _plain(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def _inputs(
    tokens: int, vocab: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(tokens, vocab, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    return (
        logits,
        targets,
        torch.randn(tokens, generator=generator),
        torch.randn(tokens, generator=generator),
    )


@pytest.mark.parametrize(
    ("tokens", "vocab", "temperature"), [(1, 2, 1.0), (7, 50, 0.7), (33, 129, 1.5)]
)
@pytest.mark.parametrize("use", ["both", "logprob", "entropy"])
def test_values_and_gradients_are_those_of_log_softmax(
    tokens: int, vocab: int, temperature: float, use: str
) -> None:
    logits, targets, grad_logprob, grad_entropy = _inputs(tokens, vocab)
    weights = (grad_logprob * (use != "entropy"), grad_entropy * (use != "logprob"))
    expected_in = logits.clone().requires_grad_()
    expected = _plain(expected_in, targets, temperature)
    sum((value * weight).sum() for value, weight in zip(expected, weights, strict=True)).backward()
    leaf = logits.clone().requires_grad_()
    found = target_logprobs(
        leaf * 1.0, targets, shard=VocabShard(size=vocab), temperature=temperature
    )
    used = [(value * weight).sum() for value, weight in zip(found, weights, strict=True)]
    {"both": used[0] + used[1], "logprob": used[0], "entropy": used[1]}[use].backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(leaf.grad, expected_in.grad, atol=2e-6, rtol=1e-5)


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets, *_ = _inputs(50, 20)
    whole = target_logprobs(logits, targets, shard=VocabShard(size=20))
    monkeypatch.setattr(vocab_parallel, "CHUNK_TOKENS", 7)
    parts = target_logprobs(logits, targets, shard=VocabShard(size=20))
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


def test_padding_columns_take_no_part_and_get_no_gradient() -> None:
    logits, targets, *_ = _inputs(9, 12)
    targets = targets % 10
    leaf = logits.clone().requires_grad_()
    found, entropy = target_logprobs(leaf * 1.0, targets, shard=VocabShard(size=10))
    expected = _plain(logits[:, :10], targets, 1.0)
    torch.testing.assert_close(found, expected[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(entropy, expected[1], atol=1e-6, rtol=1e-5)
    found.sum().backward()
    assert leaf.grad[:, 10:].abs().max() == 0
    assert leaf.grad[:, :10].abs().max() > 0


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [88.0, 89.0, 90.0]])
    found, entropy = target_logprobs(logits, torch.tensor([0, 2]), shard=VocabShard(size=3))
    assert torch.isfinite(found).all()
    assert torch.isfinite(entropy).all()
    assert found[0] == 0.0


def test_using_the_logits_after_the_backward_pass_is_refused() -> None:
    logits, targets, *_ = _inputs(3, 5)
    leaf = logits.clone().requires_grad_()
    scaled = leaf * 1.0
    found, _ = target_logprobs(scaled, targets, shard=VocabShard(size=5))
    found.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        found.sum().backward()


def _rank(rank: int, store: str, results) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    logits, targets, grad_logprob, grad_entropy = _inputs(17, 31)
    columns = 16
    part = (
        torch.nn.functional.pad(logits, (0, 1))[:, rank * columns : (rank + 1) * columns]
        .clone()
        .requires_grad_()
    )
    shard = VocabShard(
        start=rank * columns, size=min(columns, 31 - rank * columns), group=dist.group.WORLD
    )
    found, entropy = target_logprobs(part * 1.0, targets, shard=shard, temperature=0.8)
    ((found * grad_logprob).sum() + (entropy * grad_entropy).sum()).backward()
    results.put((rank, found.detach().numpy(), entropy.detach().numpy(), part.grad.numpy()))
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_vocabulary_spread_over_two_ranks_gives_what_one_gives(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, str(tmp_path / "store"), results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    found = sorted((results.get(timeout=90) for _ in ranks), key=lambda result: result[0])
    for process in ranks:
        process.join(timeout=120)
    logits, targets, grad_logprob, grad_entropy = _inputs(17, 31)
    leaf = logits.clone().requires_grad_()
    expected = _plain(leaf, targets, 0.8)
    ((expected[0] * grad_logprob).sum() + (expected[1] * grad_entropy).sum()).backward()
    for _, logprobs, entropy, _ in found:
        torch.testing.assert_close(
            torch.from_numpy(logprobs), expected[0].detach(), atol=2e-6, rtol=1e-5
        )
        torch.testing.assert_close(
            torch.from_numpy(entropy), expected[1].detach(), atol=2e-6, rtol=1e-5
        )
    merged = torch.cat([torch.from_numpy(gradient) for *_, gradient in found], dim=1)[:, :31]
    torch.testing.assert_close(merged, leaf.grad, atol=2e-6, rtol=1e-5)


def test_several_targets_of_a_position_are_as_many_rows_of_log_softmax() -> None:
    logits, *_ = _inputs(9, 12)
    targets = torch.randint(0, 12, (9, 4), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    expected_in, leaf = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = (expected_in / 0.7).log_softmax(-1).gather(1, targets)
    (expected * weights).sum().backward()
    found, _ = target_logprobs(leaf * 1.0, targets, shard=VocabShard(size=12), temperature=0.7)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(leaf.grad, expected_in.grad, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 4, 10])
def test_the_likeliest_tokens_come_first_and_padding_never(count: int) -> None:
    logits, *_ = _inputs(9, 12)
    logits[:, 10:] = 99.0
    ids, logprobs = top_logprobs(logits, count=count, shard=VocabShard(size=10), temperature=0.7)
    expected = (logits[:, :10] / 0.7).log_softmax(-1).topk(count)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(logprobs, expected.values, atol=2e-6, rtol=1e-5)
