"""What the device can do at most: a large copy, a large product of matrices, the way to the host's
memory and back. Every other figure stands beside these. Data sheets are the prediction."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from lines import Bound, Line
from timing import product_rate, product_size, seconds_of

from checks import Visit
from milescli.plan.devices import efficiency_of, spec_of
from milescli.platform.probe import probe


def measure(visit: Visit) -> Iterator[Line]:
    """See the module."""
    sheet, known = spec_of(probe())
    source = sheet.source if known else f"taken for a {sheet.name}"
    size = 2**31 if visit.on_device else 2**24
    data = torch.empty(size, dtype=torch.uint8, device=visit.torch_device).random_()
    copied = torch.empty_like(data)
    yield Line(
        name="copy",
        measured=2 * size / seconds_of(lambda: copied.copy_(data), visit) / 1e12,
        predicted=sheet.memory_bandwidth / 1e12,
        unit="TB/s, read and written",
        bound=Bound(kind="at least of predicted", value=0.75, anywhere=False),
        note=source,
    )
    yield _matmul(visit, peak=sheet.bf16_flops)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=visit.on_device)
    for name, step in (
        ("host_to_device", lambda: data.copy_(host, non_blocking=True)),
        ("device_to_host", lambda: host.copy_(data, non_blocking=True)),
    ):
        yield Line(
            name=name,
            measured=size / seconds_of(step, visit, repeats=5) / 1e9,
            predicted=efficiency_of(sheet.name).host_bandwidth / 1e9,
            unit="GB/s",
            note="pinned memory; predicted: what the planner takes a sleeping trainer's way for",
        )


def _matmul(visit: Visit, *, peak: float) -> Line:
    size = product_size(visit)
    return Line(
        name="matmul_bf16",
        measured=product_rate(visit) / 1e12,
        predicted=peak / 1e12,
        unit="TFLOP/s",
        bound=Bound(kind="at least of predicted", value=0.6, anywhere=False),
        note=f"{size} x {size} x {size}, random numbers",
    )
