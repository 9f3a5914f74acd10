"""Which of PyTorch's kernels computes attention here, and how long others would take. Used by
`numerics`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from timing import seconds_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from checks import Visit


def kernel_of(grid, inputs: Sequence[torch.Tensor]) -> str:
    """What computes a grid of the packed row: `flash`, `efficient`, `cudnn`, `math`, or the
    trainer's own `blockwise`. `inputs`: query, key and value of any length, with gradient."""
    from milescli.backends.megatron.layers.attention import has_kernel

    count, queries, keys = grid.shape
    query, key = (
        torch.empty(
            count, length, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device
        ).requires_grad_()
        for tensor, length in ((inputs[0], queries), (inputs[1], keys))
    )
    if not has_kernel(query, key, grid=grid):
        return "blockwise"
    chosen = torch._fused_sdp_choice(
        query.transpose(1, 2),
        key.transpose(1, 2),
        key.transpose(1, 2),
        is_causal=grid.is_causal,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return SDPBackend(chosen).name.lower().removesuffix("_attention")


def row_seconds(
    attend: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    rows: Sequence[tuple[list[int], object]],
    visit: Visit,
) -> dict[str, float]:
    """Seconds of forward and backward over rows of as many tokens, of (lengths, packed row) each.
    The first row warms up, the second is timed at first sight, the last when it is known."""
    upstream = torch.randn_like(inputs[0]).flatten(1)

    def run(row: object) -> None:
        torch.autograd.grad(attend(*inputs, row), inputs, upstream)

    run(rows[0][1])
    new_shape_s = _once(lambda: run(rows[1][1]), visit)
    lengths, row = rows[2]
    figures = {
        "new_shape_s": new_shape_s,
        "seconds": seconds_of(lambda: run(row), visit, repeats=5),
    }
    if not visit.on_device:
        return figures
    ends = torch.tensor([0, *lengths], device=inputs[0].device).cumsum(0).to(torch.int32)

    def run_varlen() -> None:
        out = varlen_flash(*inputs, ends, max(lengths))
        torch.autograd.grad(out, inputs, upstream.view_as(out))

    try:
        figures["varlen_s"] = seconds_of(run_varlen, visit, repeats=5)
        # flash beside it, as what the trainer looks for is that or `efficient`
        with sdpa_kernel(
            [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True
        ):
            figures["cudnn_new_shape_s"] = _once(lambda: run(rows[1][1]), visit)
            figures["cudnn_s"] = seconds_of(lambda: run(row), visit, repeats=5)
    except RuntimeError as error:  # kernels that the trainer does not take: worth no other line
        print(f"another kernel: {error}", flush=True)
    return figures


def varlen_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """PyTorch's own build of FlashAttention 2 over sequences that lie end to end: query [S, heads,
    d], key and value [S, groups, d], ends [sequences + 1] int32 -> [S, heads, d]. Causal."""
    return torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, longest, longest, 0.0, True, False, scale=scale
    )[0]


def _once(step: Callable[[], object], visit: Visit) -> float:
    _wait(visit)
    started = time.perf_counter()
    step()
    _wait(visit)
    return time.perf_counter() - started


def _wait(visit: Visit) -> None:
    if visit.on_device:
        torch.cuda.synchronize()
