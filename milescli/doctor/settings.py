"""Checks variables and versions that affect Ray and torch: Ray's version, its own switches,
allocator and debug variables. Also checks the system's limits, and that CPU kernels compile."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from milescli.backends.sglang.launch.kernels import PACKAGE, Kernels, kernels
from milescli.core.pins import pin, version_pin
from milescli.core.units import GIB, format_bytes
from milescli.doctor.finding import Finding, fail, judge_amount, ok, skip, warn
from milescli.doctor.fixes import as_root, pip_install
from milescli.platform.cpu import threads_left
from milescli.platform.cpu_kernel_library import NoKernels, loaded
from milescli.platform.environment import PlanView, engine_environment, trainer_environment
from milescli.platform.machine import Kind, Machine

DISTRIBUTION = "miles-cli"
WITHOUT_DEPENDENCIES = ("sglang",)
"""Packages installed with --no-deps: their other requirements are for GPUs."""


def check_python(*, version: tuple[int, int] = sys.version_info[:2]) -> list[Finding]:
    """Check the version of the interpreter."""
    text = ".".join(map(str, version))
    oldest, below = pin("python_oldest"), pin("python_below")
    if version_pin("python_oldest") <= version < version_pin("python_below"):
        return ok("python", f"Python {text}")
    return fail(
        "python",
        f"Python {text}",
        why=f"SGLang, Megatron-Core and Ray together need Python {oldest} or later, below {below}",
        fix=f"python{oldest} -m venv .venv && make install",
    )


def requirements() -> list[str]:
    """List the requirements of the installed package, without extras."""
    required = importlib.metadata.requires(DISTRIBUTION) or []
    return [line for line in required if "extra ==" not in line]


def check_pins(
    *,
    wanted: Sequence[str] | None = None,
    version_of: Callable[[str], str] = importlib.metadata.version,
) -> list[Finding]:
    """Compare every requirement with what is installed."""
    try:
        lines = requirements() if wanted is None else list(wanted)
    except importlib.metadata.PackageNotFoundError:
        return fail(
            "pins",
            f"{DISTRIBUTION} is not installed",
            why="its package list cannot be read",
            fix="make install",
        )
    problems, fixes = [], []
    for line in lines:
        problem = _problem(line, version_of)
        if problem:
            problems.append(problem)
            fixes.append(_fix(line))
    if not problems:
        return ok("pins", f"{len(lines)} packages as pinned")
    return fail(
        "pins",
        f"{len(problems)} of {len(lines)} packages differ from the pinned versions",
        why="; ".join(problems),
        fix=fixes,
    )


def _problem(line: str, version_of: Callable[[str], str]) -> str | None:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return f"`{line}` is not a requirement"
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    try:
        version = version_of(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is missing, expected {requirement.specifier or 'any'}"
    plain, _, build = version.partition("+")  # 2.13.0+cpu is 2.13.0
    wanted = requirement.specifier
    if requirement.name == "torch" and "rocm" in build:
        wanted = SpecifierSet(f"=={pin('torch_rocm')}")
    if wanted.contains(plain, prereleases=True):
        return None
    return f"{requirement.name} is {version}, expected {wanted}"


def _fix(line: str) -> str:
    name = line.partition("=")[0]
    return pip_install(*(["--no-deps"] if name in WITHOUT_DEPENDENCIES else []), line)


def check_kernels(
    machine: Machine, *, there: Kernels | None = None, has_engine: bool | None = None
) -> list[Finding]:
    """Return the findings `kernels` and `layers`. `there` are the installed kernels, and
    `has_engine` says if TransformerEngine is installed; both are looked up if not given."""
    if machine.kind == "cpu":
        return check_compiled()
    if machine.kind != "cuda":
        return skip("kernels", "SGLang's CUDA kernels are only for NVIDIA devices")
    if has_engine is None:
        has_engine = importlib.util.find_spec("transformer_engine") is not None
    layers = ok("layers", "TransformerEngine computes the trainer's layers")
    if not has_engine:
        layers = ok(
            "layers",
            "TransformerEngine is not installed: PyTorch's kernels compute the trainer's "
            "layers, without fused norms and grouped products of experts; make install TE=1 "
            "adds it",
        )
    return _judge_kernels(there or kernels()) + layers


def check_compiled() -> list[Finding]:
    """Return the finding `kernels` of a CPU; compiles missing kernels, which takes a second."""
    try:
        library = loaded()
    except NoKernels as error:
        why = f"{error}; rollout and training use PyTorch's own kernels, which are slower"
        return warn("kernels", "none for this CPU", why=why, fix=error.fix)
    return ok("kernels", f"compiled for this CPU, in {Path(library._name).parent}")


def _judge_kernels(there: Kernels) -> list[Finding]:
    what = f"{PACKAGE} {there.installed or 'is missing'}, torch {there.torch}"
    if there.fit:
        return ok("kernels", f"{what}: tested together")
    if there.tested is None:
        why = f"no kernels were tested with torch {there.torch}"
        return warn("kernels", what, why=why, fix="miles doctor   # its check `engine` tries them")
    why = f"kernels are built for one torch; torch {there.torch} needs {there.tested}"
    return fail(
        "kernels", what, why=why, fix=pip_install("--no-deps", f"{PACKAGE}=={there.tested}")
    )


MEMORY_NEEDED, MEMORY_WANTED = 3 * GIB, 8 * GIB
"""Free bytes: for the smallest run, and for more than one engine or rank."""
NOFILE_NEEDED, NOFILE_WANTED, NOFILE_GOOD = 1024, 8192, 65536
"""Open files: the least for a run, enough for many engines and ranks, and what the fix sets."""
THREADS_NEEDED, THREADS_WANTED = 600, 2000
"""Threads beyond those that already run. A run of 13 processes had 341 on 2 cores; libraries start
more on more cores."""


def check_memory(*, total_bytes: int, available_bytes: int) -> list[Finding]:
    """Check main memory, as far as this process may use it."""
    what = f"{format_bytes(available_bytes)} of {format_bytes(total_bytes)} free"
    look = (
        "ps -eo pid,rss,comm --sort=-rss | head   # which processes use it? end those that you do "
        "not need"
    )
    wanted = f"runs with more than one engine or rank need {format_bytes(MEMORY_WANTED)}"
    return judge_amount(
        "memory",
        what,
        available_bytes,
        needed=(MEMORY_NEEDED, f"the smallest run needs {format_bytes(MEMORY_NEEDED)}"),
        wanted=(MEMORY_WANTED, wanted),
        fix=look,
    )


def check_limits(*, soft: int | None = None, hard: int | None = None) -> list[Finding]:
    """Check the limit of open files: every actor and engine opens hundreds."""
    own_soft, own_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = own_soft if soft is None else soft, own_hard if hard is None else hard
    if soft == resource.RLIM_INFINITY or soft >= NOFILE_WANTED:
        return ok(
            "limits",
            "open files: no limit" if soft == resource.RLIM_INFINITY else f"open files: {soft}",
        )
    count = hard if hard != resource.RLIM_INFINITY and hard >= NOFILE_WANTED else NOFILE_GOOD
    may_raise = hard == resource.RLIM_INFINITY or hard >= count
    fixes = (
        [f"ulimit -n {count}"]
        if may_raise
        else [as_root(f"prlimit --pid $$ --nofile={count}:{count}")]
    )
    fixes += [] if may_raise else [f"docker run --ulimit nofile={count}:{count} ...   # in Docker"]
    what = (
        f"open files: {soft}, can be raised to "
        f"{'any number' if hard == resource.RLIM_INFINITY else hard}"
    )
    if soft < NOFILE_NEEDED:
        return fail("limits", what, why=f"Ray and SGLang need at least {NOFILE_NEEDED}", fix=fixes)
    return warn("limits", what, why=f"many engines and ranks need {NOFILE_WANTED}", fix=fixes)


def check_threads(*, root: Path = Path("/")) -> list[Finding]:
    """Check how many threads the cgroups and `ulimit -u` still allow: Ray and the engines start
    hundreds, and otherwise die with `can't start new thread`."""
    tight = min(threads_left(root), default=None)
    if tight is None:
        return ok("threads", "no limit")
    left, limit = tight
    what = f"{limit - left} of {limit} are in use"
    fixes = [
        "docker run --pids-limit=-1 ...   # in Docker",
        "ulimit -u unlimited   # if the limit is the user's",
        "systemctl show --property=TasksMax,TasksCurrent user.slice   # elsewhere: shows the limit",
    ]
    needed = (
        f"Ray, one engine and one rank start hundreds of them; {THREADS_NEEDED} should be available"
    )
    wanted = f"runs with several engines and ranks need {THREADS_WANTED} more"
    return judge_amount(
        "threads",
        what,
        left,
        needed=(THREADS_NEEDED, needed),
        wanted=(THREADS_WANTED, wanted),
        fix=fixes,
    )


NOSET = "RAY_EXPERIMENTAL_NOSET_"
SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the previous one",
    "HIP_LAUNCH_BLOCKING": "every kernel waits for the previous one",
    "AMD_SERIALIZE_KERNEL": "every kernel waits for the previous one",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor asks the driver for its memory",
    "NCCL_P2P_DISABLE": "devices of one machine communicate through the host",
    "HSA_OVERRIDE_GFX_VERSION": "kernels of another architecture run, and may be wrong",
}
"""Debug variables that slow a run down, usually left over from debugging -> their effect."""


def check_ray_version(
    *, kind: Kind, version_of: Callable[[str], str] = importlib.metadata.version
) -> list[Finding]:
    """Check that Ray is not older than the pin, the first version that assigns AMD devices through
    HIP_VISIBLE_DEVICES alone."""
    oldest = pin("ray_oldest")
    fix = pip_install(f"ray[default]>={oldest}")
    try:
        version = version_of("ray")
    except importlib.metadata.PackageNotFoundError:
        return fail(
            "ray version",
            "Ray is not installed",
            why="Ray manages every process of a run",
            fix=fix,
        )
    if Version(version) >= Version(oldest):
        return ok("ray version", f"Ray {version}")
    why = (
        "older ones mishandle HIP_VISIBLE_DEVICES (ray#52701, ray#53737): ranks use the wrong "
        "AMD device, or none"
    )
    return fail("ray version", f"Ray {version} is older than {oldest}", why=why, fix=fix)


def check_variables(plan: PlanView | None, *, environ: Mapping[str, str]) -> list[Finding]:
    """Check for variables of the user's shell that actors inherit and that do harm, and for those
    that miles replaces. `plan` is the recipe's, or None without one."""
    findings = [*_harmful_variables(environ), *(_replaced_variables(plan, environ) if plan else [])]
    return findings or ok("variables", "none that harms a run")


def _harmful_variables(environ: Mapping[str, str]) -> list[Finding]:
    findings: list[Finding] = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in environ.get(name, ""):
            why = (
                "engines inherit it: memory in such segments can neither be released while they "
                "sleep nor shared by handle"
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
                "Ray no longer restricts an actor to its own devices; miles sets this itself, "
                "for its actors only"
            )
            findings += warn("variables", f"{name}={environ[name]}", why=why, fix=f"unset {name}")
    return findings


def _replaced_variables(plan: PlanView, environ: Mapping[str, str]) -> list[Finding]:
    """Return a finding for variables that actors get with another value than the user's. Visibility
    has a separate check, and the plan sets the threads."""
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
        "miles composes the environment of its actors; `miles launch --dry-run -v` shows the "
        "reasons"
    )
    return warn("variables", changes, why=why, fix=f"unset {' '.join(names)}")
