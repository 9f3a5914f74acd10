"""MiniMax-M2 on a CPU: the norm of queries and keys over all heads, which SGLang has in Triton
alone."""

from __future__ import annotations

import torch


def install() -> None:
    """Replace the two halves of that norm: sums of squares, and what they scale."""
    from sglang.srt.models import minimax_m2

    def squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """[2 * tokens] float32, all queries' before all keys'."""
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
