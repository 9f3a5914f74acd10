"""Tests of the pins, with versions planted."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError

import pytest

from milescli.core.pins import pin
from milescli.doctor.finding import Status
from milescli.doctor.pins import check_pins, check_python, requirements

WANTED = ["ray[default]>=2.48", "sglang==0.5.20", "torch==2.13.0", "pyarrow>=15"]
GOOD = {"ray": "2.60.0", "sglang": "0.5.20", "torch": "2.13.0+cpu", "pyarrow": "26.0.1"}


def _check(**changes: str | None):
    versions = {**GOOD, **changes}

    def version_of(name: str) -> str:
        version = versions[name]
        if version is None:
            raise PackageNotFoundError(name)
        return version

    return check_pins(wanted=WANTED, version_of=version_of)[0]


def test_versions_as_pinned_are_ok_whatever_their_build() -> None:
    assert _check().status is Status.OK


@pytest.mark.parametrize(
    ("name", "version", "why", "fix"),
    [
        ("ray", "2.40.0", "ray is 2.40.0, wanted >=2.48", "pip install 'ray[default]>=2.48'"),
        (
            "sglang",
            "0.5.22",
            "sglang is 0.5.22, wanted ==0.5.20",
            "pip install --no-deps sglang==0.5.20",
        ),
        ("torch", None, "torch is missing, wanted ==2.13.0", "pip install torch==2.13.0"),
    ],
)
def test_a_wrong_or_missing_package_is_named_with_the_command_that_mends_it(
    name: str, version: str | None, why: str, fix: str
) -> None:
    finding = _check(**{name: version})
    assert (finding.status, finding.why, finding.fix) == (
        Status.FAIL,
        why,
        [f"{sys.executable} -m {fix}"],
    )


def test_torch_for_rocm_is_the_one_of_the_rocm_images() -> None:
    pinned = pin("torch_rocm")
    assert _check(torch=f"{pinned}+rocm7.2.4").status is Status.OK
    assert f"wanted =={pinned}" in _check(torch="2.13.0+rocm7.2.4").why


def test_our_own_list_is_read_and_leaves_extras_out() -> None:
    names = [line.split(";")[0] for line in requirements()]
    assert any(name.startswith("sglang==") for name in names) and not any(
        name.startswith("pytest") for name in names
    )


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 10), Status.FAIL), ((3, 11), Status.OK), ((3, 12), Status.OK), ((3, 13), Status.FAIL)],
)
def test_python_from_3_11_to_3_12_is_taken(version: tuple[int, int], status: Status) -> None:
    assert check_python(version=version)[0].status is status
