"""Implements `miles doctor`: selects the checks, runs them and shows their findings. Called by the
command; returns an exit code. Equal findings of several nodes share a row, and secrets in them are
masked."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from milescli import __version__
from milescli.backends.hub.repo import saved_token
from milescli.console.output import Output
from milescli.console.working import working
from milescli.core.errors import ExitCode, MachineError, MilesError
from milescli.core.units import format_few
from milescli.doctor.cluster import cluster_findings
from milescli.doctor.finding import (
    Check,
    Finding,
    Status,
    Watch,
    failed,
    ok,
    run_checks,
    skip,
    warn,
)
from milescli.doctor.fixes import DoctorOptions
from milescli.doctor.hub_access import check_hub
from milescli.doctor.node import (
    ComputedOnce,
    heavy_at_once,
    node_checks,
    this_machine,
    trial_checks,
)
from milescli.doctor.recipe_checks import recipe_checks
from milescli.platform.machine import Machine
from milescli.platform.probe import probe
from milescli.recipe.layers import RAY_VARIABLE
from milescli.recipe.load import LoadedRecipe, load, runs_dir
from milescli.recipe.schema import Recipe
from milescli.recipe.templates import find_recipe
from milescli.sandbox.choose import choose

SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL")
MASK = "***"
MIN_SECRET_LENGTH = 6
"""Shorter secret values are not masked within a text, since they would match inside many words. A
text that is nothing else is masked."""
MIN_PASSWORD_LENGTH = 3
"""The same limit for a password in an address, which is searched unchanged."""
_USER = re.compile(r"//[^/\s]+@")
"""Pattern up to the last @ before the path, since a password may contain one."""
_QUERY = re.compile(
    r"([?&;][^=&\s]*(?:key|token|secret|sig|passw|credential)[^=&\s]*=)[^&\s]+", re.IGNORECASE
)


def sounds_secret(name: str) -> bool:
    """Return True if a variable's name suggests a secret: WANDB_API_KEY, HF_TOKEN, db_password."""
    return any(word in name.upper() for word in SECRET_WORDS)


def mask(text: str, environ: Mapping[str, str]) -> str:
    """Return the text without the values of variables whose names suggest a secret, and without
    `user:password@` and `?token=` of addresses."""
    secrets = {
        value
        for name, value in environ.items()
        if len(value) >= MIN_SECRET_LENGTH and sounds_secret(name)
    }
    secrets |= {password for value in environ.values() for password in _passwords(value)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(f"//{MASK}@", text))


def _passwords(value: str) -> list[str]:
    """List the passwords of the addresses in a variable: libraries also show parts of an
    address."""
    passwords = [
        user.removeprefix("//").removesuffix("@").partition(":")[2] for user in _USER.findall(value)
    ]
    return [password for password in passwords if len(password) >= MIN_PASSWORD_LENGTH]


def mask_secrets(finding: Finding, environ: Mapping[str, str]) -> Finding:
    """Return the finding without secrets, as `mask` finds them."""
    cleaned = {name: mask(getattr(finding, name), environ) for name in ("what", "why")}
    return replace(finding, **cleaned, fix=[mask(command, environ) for command in finding.fix])


def mask_environment(environ: Mapping[str, str], *, prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that begin with one of `prefixes`, sorted, with the values of secret
    ones masked."""
    chosen = {name: value for name, value in sorted(environ.items()) if name.startswith(prefixes)}
    return {
        name: MASK if sounds_secret(name) else mask(value, environ)
        for name, value in chosen.items()
    }


def check_sandbox(recipe: Recipe | None) -> list[Finding]:
    """Check the sandbox on the driver's computer, which computes rewards."""
    runs_code = recipe is not None and recipe.runs_code
    packages = recipe.rollout.code.packages if recipe is not None and runs_code else None
    try:
        choice = choose(packages=packages)
    except MachineError as error:
        if runs_code:
            return failed("sandbox", error)
        return skip(
            "sandbox", f"no model code was run, because that is impossible here: {error.why}"
        )
    what = choice.reason.partition(";")[0]
    if runs_code and choice.fixes:
        return warn("sandbox", what, why=choice.reason, fix=list(choice.fixes))
    return ok("sandbox", choice.reason)


REPORTED_PACKAGES = (
    "torch",
    "sglang",
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
    """Check the machine, and the recipe if one is given. Return exit code 0, or 4 if a check fails;
    warnings do not count."""
    loaded, problem = _load(options)
    refused = [
        text for text in options.sets if any(f"--set {text}" in finding.why for finding in problem)
    ]
    options = replace(options, sets=[text for text in options.sets if text not in refused])
    output.note("checking this machine; starting an engine can take two minutes")
    # a reward that prints as it is imported would spoil the JSON
    with contextlib.redirect_stdout(sys.stderr):
        watch = partial(working, output)
        findings = problem + _findings(loaded, address=_address(options, loaded), watch=watch)
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


def _findings(loaded: LoadedRecipe | None, *, address: str | None, watch: Watch) -> list[Finding]:
    """Check every node of the cluster, if one is named and can be joined; else this machine."""
    findings: list[Finding] = []
    if address is not None:
        with watch(lambda: f"each node of {address} checks itself"):
            findings = cluster_findings(address, runs_dir=_runs_dir(loaded))
        if any(finding.node for finding in findings):
            return findings + run_checks(
                driver_checks(loaded, ComputedOnce(lambda: _planning_machine(loaded))),
                heavy_at_once=heavy_at_once(),
                watch=watch,
            )
    checks = all_checks(loaded)
    return findings + run_checks(checks, heavy_at_once=heavy_at_once(), watch=watch)


def _address(options: DoctorOptions, loaded: LoadedRecipe | None) -> str | None:
    """Return the address of the Ray cluster that a run would join: that of the recipe, or without
    one that of the option or RAY_ADDRESS (`local` means none)."""
    if loaded is not None:
        return loaded.recipe.machine.address
    address = options.address or os.environ.get(RAY_VARIABLE, "")
    return None if address in ("", "local") else address


def all_checks(loaded: LoadedRecipe | None) -> list[Check]:
    """List all checks in the order in which they are shown."""
    machine = this_machine(os.environ)
    return [
        *node_checks(
            runs_dir=_runs_dir(loaded), machine=machine, loaded=loaded, environ=os.environ
        ),
        *driver_checks(loaded, machine),
        *trial_checks(machine=machine, environ=os.environ, own_ray=True),
    ]


def driver_checks(loaded: LoadedRecipe | None, machine: Callable[[], Machine]) -> list[Check]:
    """List the checks of hub, sandbox and recipe, which run once, on the computer where a run would
    be started."""
    recipe = loaded.recipe if loaded else None
    hub = Check(
        name="hub",
        run=lambda: check_hub(recipe, environ=os.environ, token=saved_token()),
        timeout_s=60.0,
    )
    sandbox = Check(name="sandbox", run=lambda: check_sandbox(recipe), timeout_s=120.0)
    return [hub, sandbox, *([] if loaded is None else recipe_checks(loaded, machine=machine))]


def report_findings(findings: Sequence[Finding], output: Output) -> None:
    """Show the findings: as one object in JSON mode, as a table otherwise."""
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
    """Return the versions of the packages that a run needs, for bug reports."""
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
    """Load the recipe, or return what is wrong with it: the machine is checked in any case. Raises
    RecipeError if there is no such recipe."""
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
        return None, failed("recipe", error)


def _planning_machine(loaded: LoadedRecipe | None) -> Machine:
    """Return the machine for which a plan of the recipe is made: the nodes of the cluster that it
    would use."""
    from milescli.cluster.nodes import planning_machine

    return planning_machine(loaded) if loaded else probe()


def _runs_dir(loaded: LoadedRecipe | None) -> Path:
    if loaded is not None:
        return Path(loaded.recipe.run.dir).expanduser()
    return runs_dir(environ=os.environ, cwd=Path.cwd(), home=Path.home())


MAX_NAMES = 4
"""Largest number of nodes named in one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """Holds equal findings of one check."""

    finding: Finding
    """The first of them."""
    nodes: list[str]
    """Nodes with this finding; empty: this machine, or the cluster as a whole."""
    is_everywhere: bool
    """True if every node that answered this check has it."""

    @property
    def where(self) -> str:
        """Name the nodes for people; empty if they do not matter."""
        if not self.nodes or (self.is_everywhere and len(self.nodes) == 1):
            return ", ".join(self.nodes)
        if self.is_everywhere:
            return f"all {len(self.nodes)}"
        return format_few(self.nodes, MAX_NAMES)


def merge_equal(findings: Sequence[Finding]) -> list[TableRow]:
    """Merge equal findings of several nodes into one row, in the order of the checks; numbers in an
    `ok` are ignored."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    places = {finding.check: place for place, finding in reversed(list(enumerate(findings)))}
    for finding in sorted(findings, key=lambda finding: places[finding.check]):
        groups.setdefault(_equality_key(finding), []).append(finding)
    answered = {
        finding.check: {one.node for one in findings if one.check == finding.check}
        for finding in findings
    }
    rows = []
    for group in groups.values():
        nodes = sorted({finding.node for finding in group if finding.node})
        everywhere = bool(nodes) and set(nodes) == answered[group[0].check]
        rows.append(TableRow(finding=group[0], nodes=nodes, is_everywhere=everywhere))
    return rows


def show_findings(findings: Sequence[Finding], output: Output) -> None:
    """Print the table, the warnings with their fixes, and the verdict."""
    rows = merge_equal(findings)
    if any(row.nodes for row in rows):
        cells = [
            (row.finding.check, row.where or "-", row.finding.status.value, row.finding.what)
            for row in rows
        ]
        output.table(["check", "node", "status", "found"], cells)
    else:
        output.table(
            ["check", "status", "found"],
            [(r.finding.check, r.finding.status.value, r.finding.what) for r in rows],
        )
    for row in rows:
        finding, where = (
            row.finding,
            f" on {row.where}" if row.nodes and not row.is_everywhere else "",
        )
        if finding.status is Status.OK:
            continue
        lines = [
            f"{finding.check}{where}: {finding.why}",
            *(f"  fix: {fix}" for fix in finding.fix),
        ]
        output.note("\n".join(lines)) if finding.status is Status.SKIP else output.warn(
            "\n".join(lines)
        )
    counts = Counter(row.finding.status for row in rows)
    if counts[Status.FAIL]:
        output.note(
            f"not ready: {counts[Status.FAIL]} failed, {counts[Status.WARN]} with a warning"
        )
    else:
        output.success(
            f"ready: {counts[Status.OK]} checks passed, {counts[Status.WARN]} with a warning"
        )


def _equality_key(finding: Finding) -> tuple[object, ...]:
    """Return what must be equal for findings to share a row. Free bytes and seconds differ from
    node to node, and do not matter in an `ok`."""
    what = (
        re.sub(r"\d+(\.\d+)*( [KMGT]iB| m)?", "#", finding.what)
        if finding.status is Status.OK
        else finding.what
    )
    return finding.check, finding.status, what, finding.why, tuple(finding.fix)
