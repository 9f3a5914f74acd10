"""Computes log-probs of targets, the likeliest tokens, and entropy for an output layer whose
vocabulary is spread over ranks. Logits exist for one block of tokens and columns at a time, and are
recomputed for the gradients: no tensor of [tokens, vocabulary] is ever made (as in cut
cross-entropy, arXiv 2411.09009)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from milescli.plan.activations import head_block
from milescli.platform import exact, onednn


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """Describes the part of the vocabulary that this rank's rows of the output layer cover."""

    start: int = 0
    """Token id of row 0."""
    size: int
    """Number of rows that are tokens; further rows are padding and are ignored."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other parts; None if this rank holds all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Holds an output layer and its input. The logits are hidden @ weight.T in the dtype of both,
    then cap * tanh(logits / cap) in float32 if they are capped."""

    hidden: torch.Tensor
    """[T, hidden_size], equal on all ranks of the shard's group."""
    weight: torch.Tensor
    """[columns, hidden_size] this rank's rows."""
    shard: VocabShard
    cap: float | None = None

    def logits(self) -> torch.Tensor:
        """Return all of this rank's columns at once, [T, size] float32, without gradient."""
        with torch.no_grad():
            return _logits(self.hidden, self.weight[: self.shard.size], self.cap)


def target_logprobs(
    head: Head, targets: torch.Tensor, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log softmax(logits / temperature)[target], shaped like `targets`, and the entropy of
    that distribution [T], float32, equal on all ranks.

    `targets` [T] or [T, n] int64 are token ids. Both results are differentiable; the gradient of
    `head.hidden` covers this rank's rows alone, and must be summed over the group. With x = logits
    / temperature, p = softmax(x): logprob = x_target - logsumexp(x); d logprob / dx_j = [j =
    target] - p_j; d entropy / dx_j = -p_j (x_j - sum_k p_k x_k).
    """
    assert head.hidden.dim() == 2 and targets.shape[:1] == head.hidden.shape[:1], (
        head.hidden.shape,
        targets.shape,
    )
    rows = targets.view(len(targets), -1) if len(targets) else targets.view(0, 1)
    form = _SoftmaxForm(shard=head.shard, cap=head.cap, temperature=temperature)
    logprobs, entropy = _TargetLogprobs.apply(head.hidden, head.weight, rows, form)
    return logprobs.view(targets.shape), entropy


@torch.no_grad()
def top_logprobs(
    head: Head, *, count: int, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids int64, log-probs float32), [T, count] each, of the most likely tokens under
    softmax(logits / temperature), most likely first and equal on all ranks; ties are broken
    arbitrarily. `count` is at most the vocabulary's size."""
    shard, shape = head.shard, (len(head.hidden), count)
    best = head.hidden.new_full(shape, -torch.inf, dtype=torch.float32)
    ids = torch.zeros(shape, dtype=torch.int64, device=best.device)

    def visit(x: torch.Tensor, rows: slice, columns: slice) -> None:
        values, places = x.topk(min(count, x.shape[1]))
        places += columns.start + shard.start
        best[rows], ids[rows] = _merge_top_k([best[rows], values], [ids[rows], places], count)

    form = _SoftmaxForm(shard=shard, cap=head.cap, temperature=temperature)
    log_total, _ = _totals(head.hidden, head.weight, form, visit)
    best, ids = _merge_top_k(_gather(best, shard), _gather(ids, shard), count)
    return ids, best - log_total[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SoftmaxForm:
    """Describes how logits become a distribution."""

    shard: VocabShard
    cap: float | None
    temperature: float


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, form: _SoftmaxForm):
        chosen = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
        """x of the targets in this rank's part of the vocabulary"""

        def visit(x: torch.Tensor, rows: slice, columns: slice) -> None:
            local, is_here = _within(targets[rows], columns, form.shard)
            chosen[rows] += torch.where(is_here, x.gather(1, local), 0.0)

        # of a frozen weight the gradient needs no logits again, unless that of the entropy is asked
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        frozen = needs_hidden and not needs_weight and targets.shape[1] == 1
        rows = _MeanRow(hidden) if frozen and form.cap is None and not exact.is_on() else None
        log_total, mean = _totals(hidden, weight, form, visit, rows)
        _all_reduce(chosen, dist.ReduceOp.SUM, form.shard)
        ctx.form = form
        mean_row = None if rows is None else rows.of(log_total)
        ctx.save_for_backward(hidden, weight, targets, log_total, mean, mean_row)
        ctx.set_materialize_grads(False)
        return chosen - log_total[:, None], log_total - mean

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        hidden, weight, targets, log_total, mean, mean_row = ctx.saved_tensors
        form: _SoftmaxForm = ctx.form
        if mean_row is not None and grad_entropy is None:
            local, is_here = _within(targets, slice(0, form.shard.size), form.shard)
            own = torch.where(is_here, weight[local[:, 0]].float(), 0.0)
            grad_hidden = own.sub_(mean_row).mul_(grad_logprob / form.temperature)
            return grad_hidden.to(hidden.dtype), None, None, None

        def slope(x: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
            """Compute d loss / d x, in place of x."""
            scale = None if grad_logprob is None else -grad_logprob[rows].sum(1, keepdim=True)
            if grad_entropy is not None:
                by_entropy = (mean[rows, None] - x).mul_(grad_entropy[rows, None])
                scale = by_entropy if scale is None else by_entropy.add_(scale)
            grad = x.sub_(log_total[rows, None]).exp_().mul_(scale)
            if grad_logprob is not None:
                local, is_here = _within(targets[rows], columns, form.shard)
                grad.scatter_add_(1, local, torch.where(is_here, grad_logprob[rows], 0.0))
            return grad

        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for columns, blocks in _blocks(hidden, form.shard.size):
            part, of_part = weight[columns], None
            for rows in blocks:
                logits = _logits(hidden[rows], part, form.cap)
                bend = None if form.cap is None else 1 - (logits / form.cap).square_()
                grad = _divide_by_temperature(
                    slope(_divide_by_temperature(logits, form.temperature), rows, columns),
                    form.temperature,
                )
                grad = (grad if bend is None else grad.mul_(bend)).to(weight.dtype)
                grad_hidden[rows] += onednn.product(grad, part.t())
                if grad_weight is not None:
                    more = onednn.weight_gradient(grad, hidden[rows])
                    of_part = more.float() if of_part is None else of_part.add_(more)
            if of_part is not None:
                grad_weight[columns] = of_part
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


class _MeanRow:
    """Accumulates sum_k p_k weight_k [T, hidden_size] over this rank's rows of the weight, block by
    block, before the sum of the exponentials is known (as flash attention does)."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self._sum = torch.zeros_like(hidden, dtype=torch.float32)
        self._peak = self._sum.new_full((len(hidden), 1), -torch.inf)

    def add(
        self, weights: torch.Tensor, peak: torch.Tensor, part: torch.Tensor, rows: slice
    ) -> None:
        """Add the rows `part` of the weight, weighted by `weights` [rows, columns], exp(x -
        peak)."""
        before, own = self._peak[rows], peak[:, None]
        after = torch.maximum(before, own)
        more = onednn.product(weights.to(part.dtype), part.t()).float()
        self._sum[rows] = (
            self._sum[rows].mul_((before - after).exp()).addcmul_(more, (own - after).exp())
        )
        self._peak[rows] = after

    def of(self, log_total: torch.Tensor) -> torch.Tensor:
        """Return the sum, with log_total [T] = logsumexp(x) over all ranks."""
        return self._sum.mul_((self._peak - log_total[:, None]).exp())


def _totals(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    form: _SoftmaxForm,
    visit: Callable[[torch.Tensor, slice, slice], None],
    mean_row: _MeanRow | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logsumexp(x), sum_k p_k x_k) [T] over all ranks. `visit` is called with every block
    of x, its rows, and which of this rank's columns it covers. `mean_row` receives the same
    blocks."""
    if exact.is_on():
        assert form.shard.group is None or form.shard.group.size() == 1, "the plan refuses tp"
        return _exact_totals(hidden, weight, form, visit)
    blocks = list(_blocks(hidden, form.shard.size))
    shape = (len(blocks), len(hidden))
    peaks, sums, firsts = torch.zeros((3, *shape), dtype=torch.float32, device=hidden.device)
    """[blocks of columns, T] of each: the largest x, sum exp(x - peak), sum exp(x - peak) (x -
    peak)"""
    for number, (columns, rows_of_blocks) in enumerate(blocks):
        for rows in rows_of_blocks:
            x = _divide_by_temperature(
                _logits(hidden[rows], weight[columns], form.cap), form.temperature
            )
            visit(x, rows, columns)
            peak = x.amax(dim=1)
            p = x.sub_(peak[:, None]).exp()
            peaks[number, rows], sums[number, rows] = peak, p.sum(dim=1)
            firsts[number, rows] = torch.linalg.vecdot(p, x)
            if mean_row is not None:
                mean_row.add(p, peak, weight[columns], rows)
    # a rank beyond the end of a small vocabulary has no columns
    peak = peaks.amax(dim=0) if blocks else peaks.new_full(shape[1:], -torch.inf)
    _all_reduce(peak, dist.ReduceOp.MAX, form.shard)
    log_scale = peaks.sub_(peak)
    share = log_scale.exp()
    both = torch.stack(
        [sums.mul(share).sum(0), firsts.addcmul_(sums, log_scale).mul_(share).sum(0)]
    )
    _all_reduce(both, dist.ReduceOp.SUM, form.shard)
    return both[0].log() + peak, both[1] / both[0] + peak


def _exact_totals(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    form: _SoftmaxForm,
    visit: Callable[[torch.Tensor, slice, slice], None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `_totals` from whole rows of logits, as engines do. A block has as many numbers as in
    `_totals`."""
    columns = slice(0, form.shard.size)
    tokens, width = head_block(on_host=hidden.device.type == "cpu")
    log_total, mean = torch.empty((2, len(hidden)), dtype=torch.float32, device=hidden.device)
    for rows in _slices(len(hidden), max(tokens * width // form.shard.size, 1)):
        x = _divide_by_temperature(
            _logits(hidden[rows], weight[columns], form.cap), form.temperature
        )
        visit(x, rows, columns)
        log_total[rows] = exact.log_total(x)
        logprobs = x.sub_(log_total[rows, None])
        mean[rows] = torch.linalg.vecdot(logprobs.exp(), logprobs)
    return log_total, mean.add_(log_total)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return [rows, columns] the capped logits, float32, a new tensor."""
    logits = onednn.product(hidden, weight).float()
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _divide_by_temperature(x: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide x by the temperature, in place."""
    return x if temperature == 1.0 else x.div_(temperature)


def _blocks(hidden: torch.Tensor, size: int) -> Iterator[tuple[slice, list[slice]]]:
    """Yield parts of the columns, each with its blocks of tokens: columns are the outer loop, so
    that every part of the weight, and of its gradient, is read and written once."""
    tokens, columns = head_block(on_host=hidden.device.type == "cpu")
    rows = _slices(len(hidden), tokens)
    return ((part, rows) for part in _slices(size, columns))


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _within(
    targets: torch.Tensor, columns: slice, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (places [rows, n] among the columns, whether the targets are among them)."""
    local = targets - (shard.start + columns.start)
    is_here = (local >= 0) & (local < columns.stop - columns.start)
    return torch.where(is_here, local, 0), is_here


def _merge_top_k(
    values: list[torch.Tensor], ids: list[torch.Tensor], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values, ids) [rows, count] of the largest values among several parts [rows, n]."""
    best, places = torch.cat(values, dim=1).topk(count)
    return best, torch.cat(ids, dim=1).gather(1, places)


def _all_reduce(tensor: torch.Tensor, operation: dist.ReduceOp, shard: VocabShard) -> None:
    if shard.group is not None and shard.group.size() > 1:
        dist.all_reduce(tensor, op=operation, group=shard.group)


def _gather(part: torch.Tensor, shard: VocabShard) -> list[torch.Tensor]:
    """Return [ranks] the parts of all ranks."""
    if shard.group is None or shard.group.size() == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(shard.group.size())]
    dist.all_gather(parts, part.contiguous(), group=shard.group)
    return parts


class SumOverRanks(torch.autograd.Function):
    """Sums over ranks, and all-reduces the gradient too: each rank's share of the loss depends on
    the sum, and so on every rank's part."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
