"""Trials of the real parts, each the smallest that proves it: torch sees the devices, Ray starts,
processes add numbers, an engine answers (`engine_trial`). Run as `python -m milescli.doctor.trials
NAME FOLDER DEVICE` by `trial`; writes findings as JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal, cast

from milescli.cluster.watchdog import start_watchdog
from milescli.core.errors import MilesError
from milescli.core.run_processes import TOKEN_VARIABLE
from milescli.doctor.collective import PLACE_VARIABLE, Place, read_report, take_part, write_report
from milescli.doctor.engine_trial import try_engine
from milescli.doctor.finding import Finding, Status, fail, ok, skip
from milescli.doctor.links import judge_collective
from milescli.doctor.tiny_trainer import tiny_plan
from milescli.doctor.torch_build import describe_torch

NO_SETTINGS: Mapping[str, str] = {}
_LAST_LINES = 8
"""Of a broken trial's log, shown with the finding."""
_TRIAL_OF = {"weights": "engine", "trainer": "engine", "agreement": "engine", "links": "collective"}


def run_trial(
    check: str,
    *,
    device_kind: str,
    timeout_s: float,
    command: list[str] | None = None,
    names: tuple[str, ...] = (),
    environ: Mapping[str, str] = os.environ,
    settings: Mapping[str, str] = NO_SETTINGS,
) -> list[Finding]:
    """The findings that the trial `check` writes as JSON lines. Whatever it started has ended when
    this returns.

    `command` replaces the trial's own; `names`: the checks that it answers for, where not just
    `check`; `environ`: what it starts with; `settings`: variables of this trial, over those of
    every trial.
    """
    # short: socket names are bounded at 107 bytes
    folder = Path(tempfile.mkdtemp(prefix="miles-", dir="/tmp"))
    token = secrets.token_hex(16)
    watchdog = start_watchdog(token=token, scratch_dirs=[folder])
    own = [sys.executable, "-m", "milescli.doctor.trials", check, str(folder), device_kind]
    environment = {
        **environ,
        TOKEN_VARIABLE: token,
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder),
        **settings,
    }
    output, log = folder / "findings.jsonl", folder / "trial.log"
    try:
        ended = _run(command or own, environment, output=output, log=log, timeout_s=timeout_s)
        findings = _findings(output.read_text(encoding="utf-8", errors="replace"))
        there = {finding.check for finding in findings}
        missing = [name for name in names or (check,) if name not in there]
        if missing:
            findings.append(_broken(missing[0], ended, log, device_kind))
        for name in missing[1:]:
            findings += skip(name, f"see `{missing[0]}`, which comes first")
        return findings
    finally:
        watchdog.release()


def _run(
    command: list[str], environment: dict[str, str], *, output: Path, log: Path, timeout_s: float
) -> str:
    """How it ended, in words. Files, not pipes: a process that the trial left behind would hold a
    pipe open."""
    with output.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        try:
            return f"ended with status {process.wait(timeout_s)} and said nothing"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"did not end within {timeout_s:g} s"


def _findings(text: str) -> list[Finding]:
    findings = []
    for line in text.splitlines():
        if line.startswith('{"check"'):
            raw = json.loads(line)
            findings.append(Finding(**{**raw, "status": Status(raw["status"])}))
    return findings


def _broken(name: str, ended: str, log: Path, device_kind: str) -> Finding:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    why = f"the trial {ended}; its last words:\n" + (
        "\n".join(f"  | {line}" for line in lines) or "  (none)"
    )
    return fail(
        name,
        "does not work here",
        why=why,
        fix=f"{sys.executable} -m milescli.doctor.trials {_TRIAL_OF.get(name, name)} $(mktemp -d) "
        f"{device_kind}   # watch it",
    )[0]


Kind = Literal["cuda", "rocm", "cpu"]
WORLD_SIZE = 2
"""Processes of the collective on a CPU."""
COLLECTIVE_S = 270.0
"""Bound on it; the trial itself has 300 s."""


def try_ray(folder: Path, kind: Kind) -> list[Finding]:
    """A session on loopback with one bundle and one actor-free placement group."""
    from milescli.backends.ray.cluster import Cluster

    plan = tiny_plan("cpu")
    start = time.monotonic()
    cluster = Cluster(address=None, temp_dir=folder, environment={})
    cluster.start(plan)
    try:
        asyncio.run(cluster.place(plan, timeout_s=60.0))
    finally:
        cluster.stop()
    return ok(
        "ray", f"a session started, placed a bundle and ended in {time.monotonic() - start:.1f} s"
    )


def try_torch(folder: Path, kind: Kind) -> list[Finding]:
    """What torch was built for and what it sees, as one line of JSON for `torch_build`."""
    return ok("torch", json.dumps(describe_torch()))


def try_collective(folder: Path, kind: Kind) -> list[Finding]:
    """An all-reduce over each pair of devices (on a CPU: between two processes) and over all, by
    the backend that runs would use."""
    import torch
    from torch.multiprocessing.spawn import ProcessException

    from milescli.platform.ports import free_ports

    backend: Literal["gloo", "nccl"] = "gloo" if kind == "cpu" else "nccl"
    size = WORLD_SIZE if kind == "cpu" else torch.cuda.device_count()
    start = time.monotonic()
    context = torch.multiprocessing.start_processes(
        take_one_part,
        args=(size, backend, free_ports(1)[0], str(folder)),
        nprocs=size,
        join=False,
        # forked, they have torch already; a process that has opened a device cannot be
        start_method="fork" if kind == "cpu" else "spawn",
    )
    deadline = start + COLLECTIVE_S
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


def take_one_part(
    rank: int, size: int, backend: Literal["gloo", "nccl"], port: int, folder: str
) -> None:
    """One process of `try_collective`."""
    place = Place(
        rank=rank,
        names=[str(number) for number in range(size)],
        addresses=["127.0.0.1"] * size,
        meeting=("127.0.0.1", port),
        backend=backend,
        device=rank if backend == "nccl" else None,
    )
    file = Path(folder) / f"report-{rank}.json"
    take_part(place, on_step=lambda report: write_report(file, report))


def try_nodes(folder: Path, kind: Kind) -> list[Finding]:
    """This node's part of the collective over all nodes. Its place is in the environment; what it
    saw goes out as one line of JSON."""
    raw = json.loads(os.environ[PLACE_VARIABLE])
    report = take_part(
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
    """Run the trial and write its findings; a MilesError is a finding, anything else a traceback in
    the log."""
    name, folder, kind = arguments
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print belongs into the log
    try:
        findings = TRIALS[name](Path(folder), cast(Kind, kind))
    except MilesError as error:
        findings = fail(name, error.what, why=error.why, fix=error.fixes)
    for finding in findings:
        print(json.dumps(asdict(finding)), file=reply, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
