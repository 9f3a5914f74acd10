"""State-space duality (Mamba-2, arXiv 2405.21060) and the short convolution before it, over a row
of packed sequences, in plain PyTorch. Used by `mamba`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_CHUNK = 64
"""Positions that are computed as a matrix; between chunks runs the recurrence."""


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, place: torch.Tensor
) -> torch.Tensor:
    """Causal convolution of each channel by itself, within each sequence. x [S, channels], weight
    [channels, kernel] with the present position last, place [S]: of each position in its sequence.
    Returns float32."""
    wide, weight = x.float(), weight.float()
    out = wide * weight[:, -1]
    for back in range(1, weight.shape[-1]):
        if back >= x.shape[0]:
            break
        earlier = F.pad(wide, (0, 0, back, 0))[: x.shape[0]]
        out = out + torch.where((place >= back)[:, None], earlier, 0.0) * weight[:, -1 - back]
    return out if bias is None else out + bias.float()


def scan(
    x: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    sequence: torch.Tensor,
    chunk: int = _CHUNK,
) -> torch.Tensor:
    """h_t = exp(decay_t) h_(t-1) + b_t x_t, y_t = c_t h_t, with h = 0 before each sequence; in
    chunks (arXiv 2405.21060, section 6): within one as attention with decaying weights, between
    them the recurrence.

    x [S, H, P], decay [S, H] (not positive), b and c [S, G, N], all float32; sequence [S]: number
    of each position's sequence, ascending. H / G heads share a b and a c. Returns [S, H, P].
    """
    length, num_groups = x.shape[0], b.shape[1]
    chunk = min(chunk, length)
    missing = -length % chunk
    x, decay, b, c = (
        F.pad(part, (0, 0) * (part.dim() - 1) + (0, missing)) for part in (x, decay, b, c)
    )
    sequence = F.pad(sequence, (0, missing), value=-1).unflatten(0, (-1, chunk))
    # C chunks of Q positions; heads as G groups of R
    x = (
        x.unflatten(1, (num_groups, -1)).unflatten(0, (-1, chunk)).permute(0, 2, 3, 1, 4)
    )  # C G R Q P
    b, c = (part.unflatten(0, (-1, chunk)).transpose(1, 2) for part in (b, c))  # C G Q N
    # differences of sums: rounded to float32 only after they are taken
    total = (
        decay.double()
        .unflatten(1, (num_groups, -1))
        .unflatten(0, (-1, chunk))
        .cumsum(dim=1)
        .permute(0, 2, 3, 1)
    )  # C G R Q
    seen = (sequence[:, :, None] == sequence[:, None, :]).tril()[:, None, None]
    weights = (
        _exp(total[..., :, None] - total[..., None, :], where=seen)
        * (c @ b.transpose(-1, -2))[:, :, None]
    )
    y = weights @ x
    if len(sequence) > 1:
        y = y + _from_before(x, total, b, c, sequence=sequence)
    return y.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)[:length]


def _from_before(
    x: torch.Tensor,
    total: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    sequence: torch.Tensor,
) -> torch.Tensor:
    """What the positions of each chunk get from the chunks before. Shapes as in `scan` after its
    rearrangement."""
    last = sequence[:, -1:]
    to_end = _exp(total[..., -1:] - total, where=(sequence == last)[:, None, None])  # C G R Q
    added = b.transpose(-1, -2)[:, :, None] @ (x * to_end[..., None])  # C G R N P
    goes_on = torch.cat([torch.zeros_like(last[:1], dtype=torch.bool), last[1:] == last[:-1]])
    kept = _exp(total[..., -1], where=goes_on[..., None])[..., None, None]  # C G R 1 1
    states = [torch.zeros_like(added[0])]
    for number in range(len(added) - 1):
        states.append(states[-1] * kept[number] + added[number])
    before = torch.cat([torch.full_like(last[:1], -1), last[:-1]])
    from_start = _exp(total, where=(sequence == before)[:, None, None])
    return from_start[..., None] * (c[:, :, None] @ torch.stack(states))


def _exp(exponent: torch.Tensor, *, where: torch.Tensor) -> torch.Tensor:
    """float32, 0 elsewhere: there the exponent may be so large that its exponential is infinite,
    and its gradient no number."""
    return exponent.float().masked_fill(~where, float("-inf")).exp()
