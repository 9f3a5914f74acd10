"""Tests of the pins, with versions planted."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from milescli.doctor.finding import Status
from milescli.doctor.pins import check_pins, check_python, requirements

WANTED = ["ray[default]>=2.48", "sglang==0.5.20", "torch==2.13.0", "pyarrow>=15"]
GOOD = {"ray": "2.60.0", "sglang": "0.5.20", "torch": "2.13.0+cpu", "pyarrow": "26.0.1"}


def _check(**changes: str | None):
    versions = {**GOOD, **changes}

    def version_of(name: str) -> str:
        found = versions[name]
        if found is None:
            raise PackageNotFoundError(name)
        return found

    return check_pins(wanted=WANTED, version_of=version_of)[0]


def test_versions_as_pinned_are_ok_whatever_their_build() -> None:
    assert _check().status is Status.OK


@pytest.mark.parametrize(
    ("name", "version", "why", "fix"),
    [
        ("ray", "2.40.0", "ray is 2.40.0, wanted >=2.48", "pip install 'ray[default]>=2.48'"),
        ("sglang", "0.5.22", "sglang is 0.5.22, wanted ==0.5.20", "pip install --no-deps 'sglang==0.5.20'"),
        ("torch", None, "torch is missing, wanted ==2.13.0", "pip install 'torch==2.13.0'"),
    ],
)
def test_a_wrong_or_missing_package_is_named_with_the_command_that_mends_it(
    name: str, version: str | None, why: str, fix: str
) -> None:
    found = _check(**{name: version})
    assert (found.status, found.why, found.fix) == (Status.FAIL, why, [fix])


def test_our_own_list_is_read_and_leaves_extras_out() -> None:
    names = [line.split(";")[0] for line in requirements()]
    assert any(name.startswith("sglang==") for name in names) and not any(name.startswith("pytest") for name in names)


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), Status.FAIL), ((3, 11), Status.OK), ((3, 12), Status.OK), ((3, 13), Status.FAIL)]
)
def test_python_from_3_11_to_3_12_is_taken(version: tuple[int, int], status: Status) -> None:
    assert check_python(version=version)[0].status is status


def test_the_lists_that_docker_installs_from_keep_to_the_package_own_list() -> None:
    """Three files name versions: pyproject.toml leads, docker/requirements-cpu.txt and docker/install.sh must agree with it."""
    root = Path(__file__).parents[2]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    own = {each.name: each.specifier for each in map(Requirement, listed)}
    text = (root / "docker/requirements-cpu.txt").read_text()
    installed = {
        each.name: each.specifier for each in map(Requirement, [line for line in text.splitlines() if line and line[0] != "#"])
    }
    pins = dict(re.findall(r"\b(torch|sglang)=([\d.]+)", (root / "docker/install.sh").read_text()))
    assert set(own) <= set(installed) | set(pins)
    assert all(own[name].contains(version) for name, version in pins.items()), pins
    for name in set(own) & set(installed):
        exact = [each.version for each in installed[name] if each.operator == "=="]
        agrees = installed[name] == own[name] or (all(map(own[name].contains, exact)) if exact else not installed[name])
        assert agrees, f"{name}: {own[name]} in pyproject.toml, {installed[name]} in docker/requirements-cpu.txt"
