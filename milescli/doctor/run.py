"""`miles doctor`: which checks there are, and how their findings are shown. Called by the command;
ends with an exit code."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from milescli import __version__
from milescli.backends.hub.home import saved_token
from milescli.console.output import Output
from milescli.core.errors import ExitCode, MilesError
from milescli.doctor.cluster import cluster_findings
from milescli.doctor.finding import Check, Finding, Status, fail, run_checks
from milescli.doctor.fixes import DoctorOptions
from milescli.doctor.hub_access import check_hub
from milescli.doctor.masking import mask_environment, mask_secrets
from milescli.doctor.node import Once, heavy_at_once, node_checks, this_machine, trial_checks
from milescli.doctor.recipe_checks import recipe_checks
from milescli.doctor.sandbox import check_sandbox
from milescli.doctor.table import show_findings
from milescli.platform.machine import Machine
from milescli.platform.probe import probe
from milescli.recipe.layers import RAY_VARIABLE
from milescli.recipe.load import LoadedRecipe, load, runs_dir
from milescli.recipe.templates import find_recipe

REPORTED_PACKAGES = (
    "torch",
    "sglang",
    "sglang-router",
    "megatron-core",
    "ray",
    "transformers",
    "huggingface-hub",
)
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


def run_doctor(options: DoctorOptions, *, output: Output) -> int:
    """Check the machine, and the recipe where one is given. 0, or 4 where something fails; warnings
    do not count."""
    loaded, problem = _load(options)
    refused = [
        text for text in options.sets if any(f"--set {text}" in finding.why for finding in problem)
    ]
    options = replace(options, sets=[text for text in options.sets if text not in refused])
    output.note("checking; starting an engine takes up to a minute or two")
    # a reward that prints as it is imported would spoil the JSON
    with contextlib.redirect_stdout(sys.stderr):
        findings = problem + _findings(loaded, address=_address(options, loaded))
    secrets = {**os.environ, "SAVED_HUB_TOKEN": saved_token() or ""}
    findings = [
        mask_secrets(
            replace(finding, fix=[options.full_command(fix) for fix in finding.fix]), secrets
        )
        for finding in findings
    ]
    report_findings(findings, output)
    return int(
        ExitCode.NOT_READY
        if any(finding.status is Status.FAIL for finding in findings)
        else ExitCode.DONE
    )


def _findings(loaded: LoadedRecipe | None, *, address: str | None) -> list[Finding]:
    """Of every node of the cluster, where one is named and can be joined; else of this machine."""
    findings: list[Finding] = []
    if address is not None:
        findings = cluster_findings(address, runs_dir=_runs_dir(loaded))
        if any(finding.node for finding in findings):
            return findings + run_checks(
                driver_checks(loaded, Once(lambda: _whole_machine(loaded))),
                heavy_at_once=heavy_at_once(),
            )
    return findings + run_checks(all_checks(loaded), heavy_at_once=heavy_at_once())


def _address(options: DoctorOptions, loaded: LoadedRecipe | None) -> str | None:
    """Of the Ray cluster that a run would join: as the recipe has it; without one, as the option or
    RAY_ADDRESS has it (`local`: none)."""
    if loaded is not None:
        return loaded.recipe.machine.address
    address = options.address or os.environ.get(RAY_VARIABLE, "")
    return None if address in ("", "local") else address


def all_checks(loaded: LoadedRecipe | None) -> list[Check]:
    """In the order in which they are shown."""
    machine = this_machine(os.environ)
    return [
        *node_checks(
            runs_dir=_runs_dir(loaded), machine=machine, loaded=loaded, environ=os.environ
        ),
        *driver_checks(loaded, machine),
        *trial_checks(machine=machine, environ=os.environ, own_ray=True),
    ]


def driver_checks(loaded: LoadedRecipe | None, machine: Callable[[], Machine]) -> list[Check]:
    """Of hub, sandbox and recipe: once, from where a run would be started."""
    recipe = loaded.recipe if loaded else None
    hub = Check(
        name="hub",
        run=lambda: check_hub(recipe, environ=os.environ, token=saved_token()),
        timeout_s=60.0,
    )
    sandbox = Check(name="sandbox", run=lambda: check_sandbox(recipe), timeout_s=120.0)
    return [hub, sandbox, *([] if loaded is None else recipe_checks(loaded, machine=machine))]


def report_findings(findings: Sequence[Finding], output: Output) -> None:
    """One object in JSON mode, a table otherwise."""
    counts = Counter(finding.status for finding in findings)
    payload = {
        "counts": {status.value: counts[status] for status in Status},
        "findings": [asdict(finding) for finding in findings],
    }
    output.json(
        "doctor",
        {
            **payload,
            "versions": versions(),
            "environment": mask_environment(os.environ, prefixes=REPORTED_VARIABLES),
        },
    )
    show_findings(findings, output)


def versions() -> dict[str, str]:
    """Of what a run is made of; for bug reports."""
    installed = {
        "miles": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for name in REPORTED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def _load(options: DoctorOptions) -> tuple[LoadedRecipe | None, list[Finding]]:
    """The recipe, or what is wrong with it: the machine is looked at all the same. Raises
    RecipeError where there is no such recipe."""
    if options.recipe is None:
        return None, []
    find_recipe(options.recipe, cwd=Path.cwd())
    flags = {"machine.address": f"--address {options.address}"} if options.address else {}
    try:
        return load(
            options.recipe,
            sets=options.sets,
            flags=flags,
            environ=os.environ,
            cwd=Path.cwd(),
            home=Path.home(),
        ), []
    except MilesError as error:
        return None, fail("recipe", error.what, why=error.why, fix=error.fixes)


def _whole_machine(loaded: LoadedRecipe | None) -> Machine:
    """What a plan of the recipe is made for: the nodes of the cluster that it takes."""
    from milescli.cluster.nodes import planning_machine

    return planning_machine(loaded) if loaded else probe()


def _runs_dir(loaded: LoadedRecipe | None) -> Path:
    if loaded is not None:
        return Path(loaded.recipe.run.dir).expanduser()
    return runs_dir(environ=os.environ, cwd=Path.cwd(), home=Path.home())
