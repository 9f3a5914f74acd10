"""Are the packages that miles needs installed, in the versions that it was tested with. The list is
the one of the package itself, which docker/pins.env leads."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from milescli.core.pins import pin, version_pin
from milescli.doctor.finding import Finding, fail, ok
from milescli.doctor.fixes import pip_install

DISTRIBUTION = "miles-cli"
WITHOUT_DEPENDENCIES = ("sglang",)
"""Installed with --no-deps: what they ask for beyond our list is for GPUs."""


def check_python(*, version: tuple[int, int] = sys.version_info[:2]) -> list[Finding]:
    """The interpreter."""
    text = ".".join(map(str, version))
    oldest, below = pin("python_oldest"), pin("python_below")
    if version_pin("python_oldest") <= version < version_pin("python_below"):
        return ok("python", f"Python {text}")
    return fail(
        "python",
        f"Python {text}",
        why=f"SGLang, Megatron-Core and Ray together run from {oldest} on, below {below}",
        fix=f"python{oldest} -m venv .venv && make install",
    )


def requirements() -> list[str]:
    """What the installed package asks for, extras aside."""
    required = importlib.metadata.requires(DISTRIBUTION) or []
    return [line for line in required if "extra ==" not in line]


def check_pins(
    *,
    wanted: Sequence[str] | None = None,
    version_of: Callable[[str], str] = importlib.metadata.version,
) -> list[Finding]:
    """Every requirement against what is installed."""
    try:
        lines = requirements() if wanted is None else list(wanted)
    except importlib.metadata.PackageNotFoundError:
        return fail(
            "pins",
            f"{DISTRIBUTION} is not installed",
            why="its list of packages cannot be read",
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
        f"{len(problems)} of {len(lines)} packages are not as pinned",
        why="; ".join(problems),
        fix=fixes,
    )


def _problem(line: str, version_of: Callable[[str], str]) -> str | None:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return f"`{line}` is no requirement"
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    try:
        version = version_of(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is missing, wanted {requirement.specifier or 'any'}"
    plain, _, build = version.partition("+")  # 2.13.0+cpu is 2.13.0
    wanted = requirement.specifier
    if requirement.name == "torch" and "rocm" in build:
        wanted = SpecifierSet(f"=={pin('torch_rocm')}")
    if wanted.contains(plain, prereleases=True):
        return None
    return f"{requirement.name} is {version}, wanted {wanted}"


def _fix(line: str) -> str:
    name = line.partition("=")[0]
    return pip_install(*(["--no-deps"] if name in WITHOUT_DEPENDENCIES else []), line)
