"""`miles doctor`: which checks there are, and how their findings are told. Called by the command; ends with an exit code."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from milescli import __version__
from milescli.console.output import Output
from milescli.core.errors import ExitCode, MilesError
from milescli.doctor.finding import Check, Finding, Status, mask, run_checks
from milescli.doctor.host import (
    available_memory,
    check_disk,
    check_limits,
    check_memory,
    check_platform,
    check_ports,
    check_shm,
    check_visibility,
    shm_sizes,
)
from milescli.doctor.hub_access import check_hub, saved_token
from milescli.doctor.links import check_topology
from milescli.doctor.network import check_host_name, check_interfaces, check_rdma, list_interfaces
from milescli.doctor.pins import check_pins, check_python
from milescli.doctor.settings import check_ray_version, check_variables
from milescli.doctor.torch_build import judge_trial
from milescli.doctor.trial import run_trial
from milescli.doctor.wish import recipe_checks
from milescli.platform.machine import Machine
from milescli.platform.probe import Accelerators, find_accelerators, probe, run_tool
from milescli.recipe.load import LoadedRecipe

REPORTED_PACKAGES = ("torch", "sglang", "sglang-router", "megatron-core", "ray", "transformers", "huggingface-hub")
REPORTED_VARIABLES = (
    "MILES_",
    "CUDA_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "NCCL_",
    "GLOO_",
    "RAY_",
    "PYTORCH_",
    "HF_H",
    "HF_ENDPOINT",
    "OMP_",
)


def run_doctor(loaded: LoadedRecipe | None, *, output: Output) -> int:
    """Check the machine, and the recipe where one is given. 0, or 4 where something fails; warnings do not count."""
    output.note("checking; starting an engine takes up to a minute or two")
    heavy_at_once = max(1, (os.cpu_count() or 1) // 2)
    secrets = {**os.environ, "SAVED_HUB_TOKEN": saved_token() or ""}
    findings = run_checks(all_checks(loaded), environ=secrets, heavy_at_once=heavy_at_once)
    findings = [_pasteable(each, loaded.source if loaded else "quickstart") for each in findings]
    tell(findings, output)
    return int(ExitCode.NOT_READY if any(each.status is Status.FAIL for each in findings) else ExitCode.DONE)


def all_checks(loaded: LoadedRecipe | None) -> list[Check]:
    """In the order in which they are told."""
    recipe = loaded.recipe if loaded else None
    runs_dir = Path(loaded.recipe.run.dir if loaded else "runs").expanduser()
    machine, accelerators = cache(probe), cache(_accelerators)
    shm_bytes, shm_free = shm_sizes()
    checks = [
        Check(name="python", run=check_python),
        Check(name="pins", run=check_pins),
        Check(name="platform", run=lambda: check_platform(machine()), timeout_s=120.0),
        Check(name="visibility", run=lambda: check_visibility(accelerators(), environ=os.environ), timeout_s=120.0),
        Check(name="topology", run=lambda: check_topology(accelerators()), timeout_s=120.0),
        Check(name="memory", run=lambda: _memory(machine()), timeout_s=120.0),
        Check(name="disk", run=lambda: check_disk(runs_dir), timeout_s=60.0),
        Check(name="shm", run=lambda: check_shm(size_bytes=shm_bytes, free_bytes=shm_free)),
        Check(name="limits", run=check_limits),
        Check(name="ports", run=check_ports),
        Check(name="network", run=lambda: _interfaces(machine()), timeout_s=120.0),
        Check(name="hostname", run=check_host_name),
        Check(name="rdma", run=lambda: check_rdma(environ=os.environ)),
        Check(name="ray version", run=lambda: check_ray_version(kind=machine().kind), timeout_s=120.0),
        Check(name="variables", run=lambda: _variables(loaded, machine()), timeout_s=120.0),
        Check(name="hub", run=lambda: check_hub(recipe, environ=os.environ, token=saved_token()), timeout_s=60.0),
    ]
    checks += [] if loaded is None else recipe_checks(loaded, machine=machine)
    return checks + _trials(machine)


def tell(findings: Sequence[Finding], output: Output) -> None:
    """A table of all, then why and what to do where it matters; one object in JSON mode."""
    counts = Counter(each.status for each in findings)
    told = {"counts": {status.value: counts[status] for status in Status}, "findings": [asdict(f) for f in findings]}
    output.json("doctor", {**told, "versions": _versions(), "environment": _environment(os.environ)})
    output.table(["check", "status", "found"], [(each.check, each.status.value, each.what) for each in findings])
    for each in findings:
        if each.status is Status.OK:
            continue
        lines = [f"{each.check}: {each.why}", *(f"  fix: {fix}" for fix in each.fix)]
        output.note("\n".join(lines)) if each.status is Status.SKIP else output.warn("\n".join(lines))
    if counts[Status.FAIL]:
        output.note(f"not ready: {counts[Status.FAIL]} failed, {counts[Status.WARN]} with a warning")
    else:
        output.success(f"ready: {counts[Status.OK]} checks passed, {counts[Status.WARN]} with a warning")


def _pasteable(finding: Finding, recipe: str) -> Finding:
    """A fix that is an option becomes the whole command."""
    command = f"miles launch --recipe {recipe}"
    return replace(finding, fix=[f"{command} {each}" if each.startswith("--") else each for each in finding.fix])


def _versions() -> dict[str, str]:
    """Of what a run is made of; for bug reports."""
    found = {"miles": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in REPORTED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that change what runs; secrets masked."""
    return {name: mask(value, environ) for name, value in sorted(environ.items()) if name.startswith(REPORTED_VARIABLES)}


def _trials(machine: Callable[[], Machine]) -> list[Check]:
    def trial(name: str, *, timeout_s: float, names: tuple[str, ...] = ()) -> Check:
        return Check(
            name=name,
            run=lambda: run_trial(name, device_kind=machine().kind, timeout_s=timeout_s, names=names),
            timeout_s=timeout_s + 30.0,
            is_heavy=True,
        )

    seen = Check(
        name="torch",
        run=lambda: judge_trial(run_trial("torch", device_kind=machine().kind, timeout_s=120.0), machine()),
        timeout_s=150.0,
        is_heavy=True,
    )
    return [
        seen,
        trial("ray", timeout_s=180.0),
        trial("collective", timeout_s=180.0, names=("collective", "links")),
        trial("engine", timeout_s=420.0, names=("engine", "trainer", "weights")),
    ]


def _interfaces(machine: Machine) -> list[Finding]:
    return check_interfaces(list_interfaces(), environ=os.environ, kind=machine.kind)


def _variables(loaded: LoadedRecipe | None, machine: Machine) -> list[Finding]:
    """Without a plan (the check `plan` says why) only what harms any run."""
    from milescli.runtime.launch import plan_only

    plan = None
    with contextlib.suppress(MilesError):
        plan = plan_only(loaded, machine) if loaded else None
    return check_variables(plan, environ=os.environ, address=loaded.recipe.machine.address if loaded else None)


def _accelerators() -> Accelerators:
    return find_accelerators(run_tool)


def _memory(machine: Machine) -> list[Finding]:
    total = machine.nodes[0].memory_bytes
    return check_memory(total_bytes=total, available_bytes=min(total, available_memory()))
