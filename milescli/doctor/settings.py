"""Variables and versions that Ray and torch obey and that harm runs: Ray's age, its own switches,
allocator and debug variables. Pure."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping

from packaging.version import Version

from milescli.core.pins import pin
from milescli.doctor.finding import Finding, fail, ok, warn
from milescli.doctor.fixes import pip_install
from milescli.platform.environment import PlanView, engine_environment, trainer_environment
from milescli.platform.machine import Kind

NOSET = "RAY_EXPERIMENTAL_NOSET_"
SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "HIP_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "AMD_SERIALIZE_KERNEL": "every kernel waits for the one before",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor asks the driver for its memory",
    "NCCL_P2P_DISABLE": "devices of one machine talk through the host",
    "HSA_OVERRIDE_GFX_VERSION": "kernels of another architecture are taken, which may compute "
    "something else",
}
"""Left over from a search for a fault, mostly; and what they do."""


def check_ray_version(
    *, kind: Kind, version_of: Callable[[str], str] = importlib.metadata.version
) -> list[Finding]:
    """The pinned oldest Ray is the first that hands out AMD devices by HIP_VISIBLE_DEVICES
    alone."""
    oldest = pin("ray_oldest")
    fix = pip_install(f"ray[default]>={oldest}")
    try:
        version = version_of("ray")
    except importlib.metadata.PackageNotFoundError:
        return fail(
            "ray version",
            "Ray is not installed",
            why="every process of a run is one of Ray's",
            fix=fix,
        )
    if Version(version) >= Version(oldest):
        return ok("ray version", f"Ray {version}")
    why = (
        "older ones mishandle HIP_VISIBLE_DEVICES (ray#52701, ray#53737): ranks land on the "
        "wrong AMD device, or on none"
    )
    return fail("ray version", f"Ray {version} is older than {oldest}", why=why, fix=fix)


def check_variables(plan: PlanView | None, *, environ: Mapping[str, str]) -> list[Finding]:
    """Variables of the user's shell that actors inherit and that do harm, and those that miles will
    replace. `plan`: of the recipe, or None without one."""
    findings = [*_harmful(environ), *(_replaced(plan, environ) if plan else [])]
    return findings or ok("variables", "none that harms a run")


def _harmful(environ: Mapping[str, str]) -> list[Finding]:
    findings: list[Finding] = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in environ.get(name, ""):
            why = (
                "engines inherit it: memory in such segments can neither be given back while "
                "they sleep nor shared by handle"
            )
            findings += fail(
                "variables",
                f"{name}={environ[name]}",
                why=why,
                fix=f"unset {name}   # miles sets it where it helps",
            )
    for name, why in SLOWING.items():
        if environ.get(name, "0") not in ("0", ""):
            findings += warn("variables", f"{name}={environ[name]}", why=why, fix=f"unset {name}")
    for name in sorted(environ):
        if name.startswith(NOSET) and environ[name] not in ("0", ""):
            why = (
                "Ray no longer shows an actor its own devices alone; miles sets this itself, for "
                "its actors only"
            )
            findings += warn("variables", f"{name}={environ[name]}", why=why, fix=f"unset {name}")
    return findings


def _replaced(plan: PlanView, environ: Mapping[str, str]) -> list[Finding]:
    """What the user set and an actor will not get. Visibility has a check of its own, and threads
    are the plan's."""
    ours = {**trainer_environment(plan), **engine_environment(plan)}
    names = [
        name
        for name, value in ours.items()
        if environ.get(name, value) != value
        and not name.endswith(("VISIBLE_DEVICES", "_NUM_THREADS"))
    ]
    changes = ", ".join(f"{name}={environ[name]} becomes {ours[name]}" for name in names)
    if not names:
        return []
    why = (
        "miles composes the environment of its actors; the reasons are in `miles launch "
        "--dry-run -v`"
    )
    return warn("variables", changes, why=why, fix=f"unset {' '.join(names)}")
