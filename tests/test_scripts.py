"""What is not Python is linted too: shell scripts, forms of job scripts, Dockerfiles; and make
fails where tests do."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_the_installer_shows_on_a_terminal_that_it_goes_on(tmp_path: Path) -> None:
    """With a pip that ends when the time was shown, whichever: a busy machine skips a second."""
    (tmp_path / "bin").mkdir()
    stub = (
        "while ! grep -q '0:[0-5][1-9] .* in' {0}/shown; do sleep 0.2; done; [ ! -e {0}/fails ]\n"
    )
    for name, body in (("pip", stub.format(tmp_path)), ("python", "exit 0\n")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}")
        (tmp_path / "bin" / name).chmod(0o755)
    command = f"docker/install.sh {tmp_path} cpu packages"
    for fails in (False, True):
        if fails:
            (tmp_path / "fails").touch()
        (tmp_path / "shown").touch()
        done = subprocess.run(
            ["script", "-qefc", command, str(tmp_path / "shown")],
            cwd=ROOT,
            env={**os.environ, "PYTHON": sys.executable},
            capture_output=True,
            timeout=300,
        )
        shown = done.stdout.decode().replace("\x1b[1m", "").replace("\x1b[0m", "")
        assert (done.returncode != 0) is fails, shown
        assert f"in {tmp_path}\r" in shown and "==> torch" in shown
        assert (f"ready: {tmp_path}/bin/miles" in shown) is not fails
