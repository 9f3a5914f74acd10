"""RMSNorm, and causal attention over many short sequences, on a CPU in compiled kernels. PyTorch
computes attention head by head, and took 0.95 to 2.1 times as long for the shapes that `is_for`
accepts (2 cores with AVX-512, equal lengths). Called by `layers.norm` and `layers.attention`."""

from __future__ import annotations

import torch

from milescli.platform import cpu_kernels, exact


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight for x [..., H], computed in float32 and rounded
    once."""
    return CpuRmsNorm.apply(x.float(), weight.float(), eps).to(x.dtype)


class CpuRmsNorm(torch.autograd.Function):
    """Computes x / sqrt(mean(x^2) + eps) * weight for x [..., H] float32, weight [H] float32."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scales = torch.empty(x.shape[:-1])
        out, _ = cpu_kernels.rms_norm(x, weight, eps, scales=scales)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx, grad):
        return *cpu_kernels.rms_norm_backward(grad, *ctx.saved_tensors), None


_WIDEST_HEAD = 96
_MAX_VALUES = 4096
"""Most values of a head's keys: 128 positions of 32, 64 of 64. Beyond these, PyTorch's kernel,
which multiplies matrices, is as fast or faster: 1.6 times at 128 positions of 128."""
_SKIPPING = 4
"""Factor of `_MAX_VALUES` if queries are left out, which PyTorch's kernel cannot do: this kernel
took 0.5 to 0.9 of its time at 77 to 256 positions of 64, of which 50 to 80 % were left out in 7 of
8 sequences."""


def is_for(query: torch.Tensor, longest: int, *, skips: bool = False) -> bool:
    """Return True if there is a kernel that is faster, or that is needed for exact results, for
    queries [..., heads, d] of sequences of at most `longest` positions. `skips`: some queries are
    left out."""
    size = query.shape[-1]
    most = _SKIPPING * _MAX_VALUES if skips else _MAX_VALUES
    is_faster = size <= _WIDEST_HEAD and longest * size <= most
    fits = size % cpu_kernels.LANES == 0 and (is_faster or exact.is_on())
    return fits and (exact.is_on() or cpu_kernels.supports(query))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
    skips: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention by `ShortAttention`, computed in float32 and rounded once."""
    wide = (query.float(), key.float(), value.float())
    return ShortAttention.apply(*wide, starts, longest, scale, skips).to(query.dtype)


class ShortAttention(torch.autograd.Function):
    """Computes attention of a row's sequences in place: query [S, H, d], key and value [S, G, d] ->
    [S, H, d]. `starts` [sequences + 1] int32 says where each begins, then S; `longest` is the most
    positions of one; `skips` are those of `cpu_kernels.attend_packed`."""

    @staticmethod
    def forward(ctx, query, key, value, starts, longest, scale, skips=None):
        ctx.settings = {"longest": longest, "scale": scale}
        if skips is not None:
            ctx.settings["skips"] = skips
        attend = _attend_exactly if exact.is_on() else cpu_kernels.attend_packed
        out, logs = attend(query, key, value, starts, **ctx.settings)
        ctx.save_for_backward(query, key, value, starts, logs)
        return out

    @staticmethod
    def backward(ctx, grad):
        gradients = cpu_kernels.attend_packed_backward(grad, *ctx.saved_tensors, **ctx.settings)
        return *gradients, None, None, None, None


def _attend_exactly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    *,
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attend_packed` with the kernel that engines decode with. The row serves as the
    cache, with one slot per position, so that a sequence is a part of one table of slots."""
    tokens, heads, _ = query.shape
    first = starts[:-1].long().repeat_interleave(starts.diff().long(), output_size=tokens)
    place, logs = torch.arange(tokens), torch.empty((heads, tokens))
    attended = cpu_kernels.attend_slots(
        query,
        key.contiguous(),
        value.contiguous(),
        place.int()[:, None],
        first,
        place - first + 1,
        longest=longest,
        scale=scale,
        logs=logs,
    )
    return attended, logs
