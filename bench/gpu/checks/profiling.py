"""Where the seconds of a step go, by kind of kernel. Used by `train`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable

import torch

KINDS = {
    "products": ("gemm", "cutlass_80", "cublas", "nvjet", "xmma", "splitk"),
    "attention": ("flash", "fmha", "attention", "sdpa", "cudnn"),
    "copies": ("memcpy", "copy", "catarray", "indexselect", "index_select", "gather", "scatter"),
    "reductions": ("reduce", "softmax", "norm"),
    "optimizer": ("multi_tensor", "adam"),
    "memory_set": ("memset", "fill"),
}
"""Kind -> parts of kernels' names; attention is looked for first, as its kernels are built of
products. What is none of these is `elementwise`."""


def profiled(step: Callable[[], object]) -> dict[str, float]:
    """Seconds on the device by kind, of one step, and `idle_s` in which it had nothing to do; the
    longest kernels go to the log. Empty where the profiler does not work."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            started = time.perf_counter()
            step()
            torch.cuda.synchronize()
            whole_s = time.perf_counter() - started
        seconds: Counter[str] = Counter()
        for event in profile.key_averages():
            seconds[event.key] += event.self_device_time_total / 1e6
    except Exception as error:  # a profile is worth no check
        print(f"no profile: {error}", file=sys.stderr)
        return {}
    kinds: Counter[str] = Counter()
    for name, taken in seconds.items():
        kinds[kind_of(name)] += taken
    for name, taken in seconds.most_common(22):
        print(f"{taken:8.4f} s  {name[:90]}")
    busy = sum(kinds.values())
    return {f"{kind}_s": taken for kind, taken in kinds.items()} | {
        "profiled_step_s": whole_s,
        "idle_s": max(0.0, whole_s - busy),
    }


def kind_of(kernel: str) -> str:
    """See `KINDS`."""
    name = kernel.lower()
    for kind in ("attention", *KINDS):
        if any(part in name for part in KINDS[kind]):
            return kind
    return "elementwise"
