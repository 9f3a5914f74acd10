"""A process group of this one rank, as a trainer opens it, and collectives that every rank needs.
Whether the links between devices are fast, one device cannot say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from lines import Bound, Line
from timing import seconds_of

from checks import Visit

TIMEOUT_S = 40.0


def measure(visit: Visit) -> Iterator[Line]:
    """See the module."""
    backend = "nccl" if visit.on_device else "gloo"
    if visit.on_device:
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")  # the driver's context is not the group's
    started = time.perf_counter()
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group(
        backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=TIMEOUT_S)
    )
    try:
        first = torch.ones(1, device=visit.torch_device)
        dist.all_reduce(first)
        assert float(first) == 1.0, first
        version = ".".join(map(str, torch.cuda.nccl.version())) if visit.on_device else ""
        yield Line(
            name="group_start",
            measured=time.perf_counter() - started,
            unit="s",
            bound=Bound(kind="at most", value=15.0, anywhere=False),
            note=f"{backend} {version}, until its first collective is done".replace("  ", " "),
        )
        yield from _collectives(visit)
        yield Line(
            name="barrier",
            measured=seconds_of(dist.barrier, visit, repeats=5),
            unit="s",
            bound=Bound(kind="at most", value=1.0, anywhere=False),
        )
    finally:
        dist.destroy_process_group()


def _collectives(visit: Visit) -> Iterator[Line]:
    """Right in every number, and how long."""
    count = 2**26 if visit.on_device else 2**20
    given = torch.randn(count, device=visit.torch_device)
    reduced, gathered = given.clone(), torch.empty_like(given)
    steps = {
        "all_reduce": (reduced, lambda: dist.all_reduce(reduced)),
        "all_gather": (gathered, lambda: dist.all_gather_into_tensor(gathered, given)),
    }
    for name, (result, step) in steps.items():
        seconds = seconds_of(step, visit, repeats=5)
        yield Line(
            name=name,
            measured=float((result != given).sum()),
            predicted=0.0,
            unit="wrong numbers",
            bound=Bound(kind="equal"),
            note=f"{given.nbytes >> 20} MiB of float32, one rank",
            figures={"seconds": seconds, "bytes_per_s": given.nbytes / seconds},
        )
