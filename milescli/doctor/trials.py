"""Defines trials of the real parts, each as small as possible: torch sees the devices, Ray starts,
processes run an all-reduce, an engine responds (`engine_trial`). `trial` runs them as `python -m
milescli.doctor.trials NAME FOLDER DEVICE`; they write findings as JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Literal, cast

from milescli.core.errors import MilesError
from milescli.doctor.collective import (
    PLACE_VARIABLE,
    Place,
    read_report,
    run_all_steps,
    write_report,
)
from milescli.doctor.engine_trial import try_engine
from milescli.doctor.finding import Finding, failed, ok
from milescli.doctor.links import judge_collective
from milescli.doctor.tiny_trainer import tiny_plan
from milescli.doctor.torch_build import describe_torch

Kind = Literal["cuda", "rocm", "cpu"]
WORLD_SIZE = 2
"""Number of processes of the collective on a CPU."""
COLLECTIVE_TIMEOUT_S = 270.0
"""Time limit of the collective; the whole trial has 300 s."""


def try_ray(folder: Path, kind: Kind) -> list[Finding]:
    """Start a session on loopback with one bundle, and a placement group without an actor."""
    from milescli.backends.ray.cluster import Cluster

    plan = tiny_plan("cpu")
    start = time.monotonic()
    own = folder / "r"  # Ray opens its own folder to everybody: it lies below one that is ours
    own.mkdir()
    cluster = Cluster(address=None, temp_dir=own, environment={})
    cluster.start(plan)
    try:
        asyncio.run(cluster.place(plan, timeout_s=60.0))
    finally:
        cluster.stop()
    return ok(
        "ray", f"a session started, placed a bundle and ended in {time.monotonic() - start:.1f} s"
    )


def try_torch(folder: Path, kind: Kind) -> list[Finding]:
    """Report torch's build and the devices that it sees, as one line of JSON for `torch_build`."""
    return ok("torch", json.dumps(describe_torch()))


def try_collective(folder: Path, kind: Kind) -> list[Finding]:
    """Run an all-reduce over each pair of devices (on a CPU: between two processes) and over all,
    by the backend that runs would use."""
    import torch
    from torch.multiprocessing.spawn import ProcessException

    from milescli.platform.ports import free_ports

    backend: Literal["gloo", "nccl"] = "gloo" if kind == "cpu" else "nccl"
    size = WORLD_SIZE if kind == "cpu" else torch.cuda.device_count()
    start = time.monotonic()
    context = torch.multiprocessing.start_processes(
        run_process,
        args=(size, backend, free_ports(1)[0], str(folder)),
        nprocs=size,
        join=False,
        # forked, they have torch already; a process that has opened a device cannot be
        start_method="fork" if kind == "cpu" else "spawn",
    )
    deadline = start + COLLECTIVE_TIMEOUT_S
    with contextlib.suppress(ProcessException):  # the report says in which step it was
        while (
            not context.join(max(0.0, deadline - time.monotonic())) and time.monotonic() < deadline
        ):
            continue
    for process in context.processes:
        process.kill()
    reports = [read_report(folder / f"report-{rank}.json") for rank in range(size)]
    peers = [] if kind == "cpu" else _missing_peers(size)
    name = torch.cuda.get_device_name(0) if kind != "cpu" else ""
    seconds = time.monotonic() - start
    return judge_collective(
        reports,
        backend="rccl" if kind == "rocm" else backend,
        device=name,
        seconds=seconds,
        no_access=peers,
    )


def run_process(
    rank: int, size: int, backend: Literal["gloo", "nccl"], port: int, folder: str
) -> None:
    """Run one process of `try_collective`."""
    place = Place(
        rank=rank,
        names=[str(number) for number in range(size)],
        addresses=["127.0.0.1"] * size,
        meeting=("127.0.0.1", port),
        backend=backend,
        device=rank if backend == "nccl" else None,
    )
    file = Path(folder) / f"report-{rank}.json"
    run_all_steps(place, on_step=lambda report: write_report(file, report))


def try_nodes(folder: Path, kind: Kind) -> list[Finding]:
    """Join the collective over all nodes, at the place in the environment, and return the report as
    one line of JSON."""
    raw = json.loads(os.environ[PLACE_VARIABLE])
    report = run_all_steps(
        Place(**{**raw, "meeting": tuple(raw["meeting"])}),
        on_step=lambda report: write_report(folder / "report", report),
    )
    return ok("nodes", json.dumps(asdict(report)))


def _missing_peers(size: int) -> list[str]:
    import torch

    pairs = itertools.permutations(range(size), 2)
    return [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]


TRIALS: dict[str, Callable[[Path, Kind], list[Finding]]] = {
    "nodes": try_nodes,
    "torch": try_torch,
    "ray": try_ray,
    "collective": try_collective,
    "engine": try_engine,
}


def main(arguments: list[str]) -> None:
    """Run the trial and write its findings; a MilesError becomes a finding, any other error a
    traceback in the log."""
    name, folder, kind = arguments
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print belongs into the log
    try:
        findings = TRIALS[name](Path(folder), cast(Kind, kind))
    except MilesError as error:
        findings = failed(name, error)
    for finding in findings:
        print(json.dumps(asdict(finding)), file=reply, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
