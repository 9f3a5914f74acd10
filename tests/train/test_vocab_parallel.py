"""Log-probs, entropy and their gradients against torch's own log_softmax, whole and over ranks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from milescli.platform import exact
from milescli.train import vocab_parallel
from milescli.train.vocab_parallel import Head, VocabShard, target_logprobs, top_logprobs


def _head(logits: torch.Tensor, size: int | None = None, cap: float | None = None) -> Head:
    """Whose logits are these: hidden states and their gradient are those of the logits."""
    vocab = logits.shape[1]
    shard = VocabShard(size=vocab if size is None else size)
    return Head(hidden=logits, weight=torch.eye(vocab), shard=shard, cap=cap)


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
@pytest.mark.parametrize("is_exact", [False, True])
def test_values_and_gradients_are_those_of_log_softmax(
    tokens: int, vocab: int, temperature: float, use: str, is_exact: bool, monkeypatch
) -> None:
    monkeypatch.setattr(exact, "_is_on", is_exact)
    if is_exact:  # several blocks of rows, as of a large vocabulary
        monkeypatch.setattr(vocab_parallel, "head_block", lambda *, on_host: (4, 100))
    logits, targets, grad_logprob, grad_entropy = _inputs(tokens, vocab)
    weights = (grad_logprob * (use != "entropy"), grad_entropy * (use != "logprob"))
    expected_in = logits.clone().requires_grad_()
    expected = _plain(expected_in, targets, temperature)
    sum((value * weight).sum() for value, weight in zip(expected, weights, strict=True)).backward()
    leaf = logits.clone().requires_grad_()
    found = target_logprobs(_head(leaf), targets, temperature=temperature)
    used = [(value * weight).sum() for value, weight in zip(found, weights, strict=True)]
    {"both": used[0] + used[1], "logprob": used[0], "entropy": used[1]}[use].backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(leaf.grad, expected_in.grad, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_blocks_of_tokens_and_columns_make_no_difference(
    monkeypatch: pytest.MonkeyPatch, cap: float | None, dtype: torch.dtype
) -> None:
    _, targets, *grads = _inputs(50, 70)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(50, 8, generator=generator),
        torch.randn(80, 8, generator=generator),
    )

    def run(block: tuple[int, int]) -> list[torch.Tensor]:
        monkeypatch.setattr(vocab_parallel, "head_block", lambda on_host: block)
        leaves = [part.to(dtype).requires_grad_() for part in (hidden, weight)]
        head = Head(hidden=leaves[0], weight=leaves[1], shard=VocabShard(size=70), cap=cap)
        found = target_logprobs(head, targets, temperature=0.7)
        sum((f * g).sum() for f, g in zip(found, grads, strict=True)).backward()
        _, top = top_logprobs(head, count=9, temperature=0.7)
        return [*found, *(leaf.grad for leaf in leaves), top, head.logits()]

    bound = 1e-6 if dtype is torch.float32 else 1e-2
    for one, other in zip(run((7, 16)), run((50, 80)), strict=True):
        assert (one - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("needs_weight", [True, False])
@pytest.mark.parametrize("of_entropy", [True, False])
@pytest.mark.parametrize("block", [(7, 16), (50, 80)])
def test_a_head_has_the_gradients_of_its_formula(
    monkeypatch: pytest.MonkeyPatch,
    cap: float | None,
    needs_weight: bool,
    of_entropy: bool,
    block: tuple[int, int],
) -> None:
    monkeypatch.setattr(vocab_parallel, "head_block", lambda on_host: block)
    _, targets, *grads = _inputs(50, 70)
    grads = grads[: 1 + of_entropy]
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(50, 8, generator=generator),
        torch.randn(70, 8, generator=generator),
    )
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(needs_weight)]
    theirs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    head = Head(hidden=ours[0], weight=ours[1], shard=VocabShard(size=70), cap=cap)
    found = target_logprobs(head, targets, temperature=0.7)
    logits = theirs[0] @ theirs[1].T
    logs = ((logits if cap is None else cap * torch.tanh(logits / cap)) / 0.7).log_softmax(-1)
    expected = (logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1))
    for values in (found, expected):
        sum((value * grad).sum() for value, grad in zip(values, grads, strict=False)).backward()
    assert (ours[1].grad is not None) == needs_weight
    for one, other in zip(ours[: 1 + needs_weight], theirs, strict=False):
        assert (one.grad - other.grad).norm() <= 1e-6 * other.grad.norm()


def test_a_row_without_a_trained_token_has_no_gradient() -> None:
    leaf = torch.zeros(0, 5, requires_grad=True)
    found, entropy = target_logprobs(_head(leaf), torch.zeros(0, dtype=torch.int64))
    (found.sum() + entropy.sum()).backward()
    assert leaf.grad.shape == (0, 5)


def test_padding_columns_take_no_part_and_get_no_gradient() -> None:
    logits, targets, *_ = _inputs(9, 12)
    targets = targets % 10
    leaf = logits.clone().requires_grad_()
    found, entropy = target_logprobs(_head(leaf, 10), targets)
    expected = _plain(logits[:, :10], targets, 1.0)
    torch.testing.assert_close(found, expected[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(entropy, expected[1], atol=1e-6, rtol=1e-5)
    found.sum().backward()
    assert leaf.grad[:, 10:].abs().max() == 0
    assert leaf.grad[:, :10].abs().max() > 0


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [88.0, 89.0, 90.0]])
    found, entropy = target_logprobs(_head(logits), torch.tensor([0, 2]))
    assert torch.isfinite(found).all()
    assert torch.isfinite(entropy).all()
    assert found[0] == 0.0


def _rank(rank: int, store: str, results) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    logits, targets, grad_logprob, grad_entropy = _inputs(17, 31)
    columns = 16
    hidden = logits.clone().requires_grad_()
    weight = torch.eye(32)[rank * columns : (rank + 1) * columns, :31].clone()
    shard = VocabShard(
        start=rank * columns, size=min(columns, 31 - rank * columns), group=dist.group.WORLD
    )
    head = Head(hidden=hidden, weight=weight, shard=shard)
    found, entropy = target_logprobs(head, targets, temperature=0.8)
    ids, _ = top_logprobs(head, count=20, temperature=0.8)
    assert torch.equal(ids, logits.topk(20).indices)
    (alone,) = torch.autograd.grad((found * grad_logprob).sum(), hidden, retain_graph=True)
    ((found * grad_logprob).sum() + (entropy * grad_entropy).sum()).backward()
    values = (found.detach(), entropy.detach(), alone, hidden.grad)
    results.put((rank, *(value.numpy() for value in values)))
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
    (alone,) = torch.autograd.grad((expected[0] * grad_logprob).sum(), leaf, retain_graph=True)
    ((expected[0] * grad_logprob).sum() + (expected[1] * grad_entropy).sum()).backward()
    for _, logprobs, entropy, *_ in found:
        torch.testing.assert_close(
            torch.from_numpy(logprobs), expected[0].detach(), atol=2e-6, rtol=1e-5
        )
        torch.testing.assert_close(
            torch.from_numpy(entropy), expected[1].detach(), atol=2e-6, rtol=1e-5
        )
    for place, whole in ((3, alone), (4, leaf.grad)):
        merged = sum(torch.from_numpy(result[place]) for result in found)
        torch.testing.assert_close(merged, whole, atol=2e-6, rtol=1e-5)


def test_several_targets_of_a_position_are_as_many_rows_of_log_softmax() -> None:
    logits, *_ = _inputs(9, 12)
    targets = torch.randint(0, 12, (9, 4), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    expected_in, leaf = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = (expected_in / 0.7).log_softmax(-1).gather(1, targets)
    (expected * weights).sum().backward()
    found, _ = target_logprobs(_head(leaf), targets, temperature=0.7)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(leaf.grad, expected_in.grad, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 4, 10])
def test_the_likeliest_tokens_come_first_and_padding_never(count: int) -> None:
    logits, *_ = _inputs(9, 12)
    logits[:, 10:] = 99.0
    ids, logprobs = top_logprobs(_head(logits, 10), count=count, temperature=0.7)
    expected = (logits[:, :10] / 0.7).log_softmax(-1).topk(count)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(logprobs, expected.values, atol=2e-6, rtol=1e-5)
