"""MiniMax-M2 on a CPU: the norm of queries and keys over all heads, for which SGLang only has a
Triton kernel."""

from __future__ import annotations

import torch


def install() -> None:
    """Replace the two halves of that norm: the sums of squares, and the scaling by them."""
    from sglang.srt.models import minimax_m2

    def squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return [2 * tokens] float32 sums of squares, all queries' before all keys'."""
        return torch.cat([part.float().square().sum(dim=-1) for part in (query, key)])

    def apply(query, key, query_weight, key_weight, sums, tp_world: int = 1, eps: float = 1e-5):
        parts = zip((query, key), (query_weight, key_weight), sums.chunk(2), strict=True)
        return tuple(
            (
                part.float()
                * (own[:, None] / (part.shape[-1] * tp_world) + eps).rsqrt()
                * weight.float()
            ).to(part.dtype)
            for part, weight, own in parts
        )

    minimax_m2.rms_sumsq_serial, minimax_m2.rms_apply_serial = squares, apply
