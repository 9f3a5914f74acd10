"""The gated delta rule and the short convolution before it, over chunks of packed sequences, in
plain PyTorch. Used by `gated_delta`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Chunked = torch.Tensor
"""[chunks, T, ...], the chunks in the order of `Chunks`."""


def gated_delta_rule(
    query: Chunked,
    key: Chunked,
    value: Chunked,
    decay: Chunked,
    beta: Chunked,
    *,
    per_step: Sequence[int],
) -> Chunked:
    """S_t = exp(decay_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T, o_t = S_t^T q_t (arXiv
    2412.06464, eq. 10), a chunk at a time (section 3.3): within it a triangular system, between
    chunks the state S.

    query and key [chunks, T, key heads, dk], value [chunks, T, value heads, dv], decay (<= 0) and
    beta [chunks, T, value heads], all float32; value heads share key heads in order. Returns
    [chunks, T, value heads, dv].
    """
    num_keys, num_values = key.shape[2], value.shape[2]
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    # [chunks, key heads, value heads per key head, T, ...]
    value, decay, beta = (
        x.unflatten(2, (num_keys, num_values // num_keys)).movedim(1, 3)
        for x in (value, decay, beta)
    )
    until = decay.cumsum(dim=-1)
    above = torch.ones(
        until.shape[-1], until.shape[-1], dtype=torch.bool, device=until.device
    ).triu(1)
    between = (until[..., :, None] - until[..., None, :]).masked_fill(above, -torch.inf).exp()
    from_start = until.exp()[..., None]
    overlap = (key @ key.transpose(-1, -2))[:, :, None] * between * beta[..., None]
    # the diagonal of the system is 1, whatever `overlap` has there
    sides = torch.cat(
        (value * beta[..., None], key[:, :, None] * (beta[..., None] * from_start)), dim=-1
    )
    solved = torch.linalg.solve_triangular(overlap, sides, upper=False, unitriangular=True)
    within = (query @ key.transpose(-1, -2))[:, :, None] * between
    news, reads = _between_chunks(
        solved.split((value.shape[-1], key.shape[-1]), dim=-1),
        query=query[:, :, None] * from_start,
        key=key[:, :, None] * (until[..., -1:] - until).exp()[..., None],
        kept=from_start[..., -1:, :],
        per_step=per_step,
    )
    return (within @ news + reads).movedim(3, 1).flatten(2, 3)


def _between_chunks(
    solved: Sequence[torch.Tensor],
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    kept: torch.Tensor,
    per_step: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each position adds to the state, and what it reads of the state before its chunk, both
    [chunks, ..., T, dv]."""
    added, forgotten = (part.split(per_step) for part in solved)
    query, key, kept = query.split(per_step), key.split(per_step), kept.split(per_step)
    news, reads = [added[0]], [torch.zeros_like(added[0])]
    state = None
    for step in range(1, len(per_step)):
        # of the sequences that go on
        going = per_step[step]
        written = key[step - 1][:going].transpose(-1, -2) @ news[-1][:going]
        state = written if state is None else state[:going] * kept[step - 1][:going] + written
        news.append(added[step] - forgotten[step] @ state)
        reads.append(query[step] @ state)
    return torch.cat(news), torch.cat(reads)


def causal_conv(x: Chunked, weight: torch.Tensor, *, per_step: Sequence[int]) -> Chunked:
    """Each channel with the K - 1 positions before it in its sequence. x [chunks, T, channels],
    weight [channels, 1, K], K - 1 <= T."""
    width = weight.shape[-1] - 1
    if not width:
        return x * weight[:, 0, 0]
    assert width <= x.shape[1], (width, x.shape)
    ends = x[:, -width:].split(per_step)
    before = [
        torch.zeros_like(ends[0]),
        *(last[:going] for last, going in zip(ends, per_step[1:], strict=False)),
    ]
    return _Conv.apply(torch.cat((torch.cat(before), x), dim=1), weight[:, 0].t())


class _Conv(torch.autograd.Function):
    """x [chunks, K - 1 + T, channels], weight [K, channels] -> [chunks, T, channels]; written out,
    since autograd would keep K copies."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        length = x.shape[1] - len(weight) + 1
        out = x[:, :length] * weight[0]
        for shift in range(1, len(weight)):
            out.addcmul_(x[:, shift : shift + length], weight[shift])
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        length = grad.shape[1]
        grad_x, grad_weight = torch.zeros_like(x), torch.empty_like(weight)
        for shift in range(len(weight)):
            grad_x[:, shift : shift + length].addcmul_(grad, weight[shift])
            grad_weight[shift] = (x[:, shift : shift + length] * grad).sum(dim=(0, 1))
        return grad_x, grad_weight
