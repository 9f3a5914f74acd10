"""What is not Python is linted too: shell scripts, forms of job scripts, Dockerfiles; and make
fails where tests do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tools import tool

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "script",
    [
        "bench/gpu/pack.sh",
        "bench/gpu/unpack.sh",
        "docker/install.sh",
        "templates/jobs/slurm.sh",
        "templates/jobs/ssh.sh",
    ],
)
def test_shellcheck_finds_nothing(script: str) -> None:
    done = subprocess.run(
        [tool("shellcheck"), "-x", script], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm"])
def test_hadolint_finds_nothing(kind: str) -> None:
    done = subprocess.run(
        [tool("hadolint"), f"docker/Dockerfile.{kind}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm"])
def test_an_image_runs_miles_as_a_user_without_rights_and_from_the_installer_alone(
    kind: str,
) -> None:
    lines = (ROOT / f"docker/Dockerfile.{kind}").read_text().splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 1000"] and lines.index(users[0]) < lines.index(
        'ENTRYPOINT ["tini", "--", "miles"]'
    )
    assert not [line for line in lines if "pip install" in line]
    assert [line.split()[-2:] for line in lines if "docker/install.sh /opt/miles" in line] == [
        [kind, "packages"],
        [kind, "miles"],
    ]


@pytest.mark.parametrize("set_of_tests", ["good", "bad"])
def test_make_fails_where_one_of_its_sets_of_tests_does(tmp_path: Path, set_of_tests: str) -> None:
    """As `make test` and `make check` run them, beside each other."""
    pytest_like = tmp_path / "pytest.sh"
    pytest_like.write_text('#!/bin/sh\necho "ran $1"\n[ "$1" != bad ]\n')
    pytest_like.chmod(0o755)
    rules = f"include Makefile\nprobe:\n\t$(call together,begin a {set_of_tests}; begin b good)\n"
    (tmp_path / "probe.mk").write_text(rules)
    done = subprocess.run(
        ["make", "-f", str(tmp_path / "probe.mk"), "probe", f"PYTEST={pytest_like}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert f"a | ran {set_of_tests}" in done.stdout and "b | ran good" in done.stdout
    assert (done.returncode == 0) == (set_of_tests == "good")
