"""Mixture of experts on a CPU: routing in plain torch, and the record of chosen experts without
pinned memory."""

from __future__ import annotations


def install() -> None:
    """SGLang's own CPU routing needs kernels that have no wheel; its plain torch form gives the
    same choice."""
    from sglang.srt.layers.moe import topk
    from sglang.srt.mem_cache.pool_host import common

    topk.TopK.forward_cpu = topk.TopK.forward_native
    common._cuda_host_register = _not_pinned
    common._cuda_host_unregister = _not_pinned


def _not_pinned(*args: object, **kwargs: object) -> None:
    """Pinning is for copies to a GPU."""
