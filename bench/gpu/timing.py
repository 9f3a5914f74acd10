"""Seconds of a step on a device or a CPU, and the rate of a large product, which other rates stand
beside. Used by the checks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from checks import Visit


def seconds_of(step: Callable[[], object], visit: Visit, *, repeats: int = 20) -> float:
    """Median of `repeats`, after three to warm up; by the device's own events."""
    for _ in range(3):
        step()
    if not visit.on_device:
        taken = []
        for _ in range(repeats):
            started = time.perf_counter()
            step()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in marks:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def product_size(visit: Visit) -> int:
    """Rows and columns of the matrices of `product_rate`."""
    return 8192 if visit.on_device else 512


def product_rate(visit: Visit) -> float:
    """FLOP/s of a bfloat16 product of two square matrices. Random numbers: zeros take less power,
    and run faster."""
    size = product_size(visit)
    a, b = (torch.randn(size, size, device=visit.torch_device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds_of(lambda: torch.mm(a, b, out=out), visit)
