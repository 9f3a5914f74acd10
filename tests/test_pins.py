"""Versions are named in docker/pins.env alone: what repeats them is held equal to it, and what
reads it gets the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from milescli.core.pins import pin, pins, pins_file

ROOT = Path(__file__).resolve().parents[1]
KERNEL = "sglang_kernel_torch_"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXACT = ("sglang", "megatron-core")
"""Wanted by the package in the very version that was tested. Ray from the oldest that serves on:
clusters that are joined bring their own. Torch in the releases that were tested."""


def listed(file: str) -> dict[str, Requirement]:
    """The requirements of a file, the pins filled in as pip fills them in."""
    text = re.sub(
        r"\$\{PIN_([A-Z_]+)\}", lambda match: pin(match[1].lower()), (ROOT / file).read_text()
    )
    return {
        wanted.name: wanted
        for wanted in map(
            Requirement, [line for line in text.splitlines() if line and line[0] != "#"]
        )
    }


def test_the_package_asks_for_the_pinned_versions() -> None:
    own = {wanted.name: wanted for wanted in map(Requirement, PROJECT["dependencies"])}
    for name in EXACT:
        assert str(own[name].specifier) == f"=={pin(name.replace('-', '_'))}"
    assert str(own["ray"].specifier) == f">={pin('ray_oldest')}"
    tested = {name.removeprefix(KERNEL).replace("_", ".") for name in pins() if KERNEL in name}
    minors = {
        f"2.{minor}" for minor in range(20) if own["torch"].specifier.contains(f"2.{minor}.1")
    }
    assert tested == minors == {pin(name)[:4] for name in ("torch", "torch_oldest")}
    assert own["ray"].specifier.contains(pin("ray"))
    assert PROJECT["requires-python"] == f">={pin('python_oldest')},<{pin('python_below')}"


def test_the_list_that_is_installed_is_the_package_own_list() -> None:
    own = {wanted.name: wanted for wanted in map(Requirement, PROJECT["dependencies"])}
    installed = listed("docker/requirements.txt")
    assert set(installed) == set(own) - {"torch", "sglang"}
    for name, requirement in installed.items():
        assert requirement.extras == own[name].extras
        assert requirement.specifier == own[name].specifier or name == "ray", name
    assert str(installed["ray"].specifier) == f"=={pin('ray')}"


def test_what_sglang_pins_is_pinned_alike_on_a_cpu() -> None:
    """And only for that a package that miles asks for is named there once more."""
    everywhere, on_cpu = listed("docker/requirements.txt"), listed("docker/requirements-cpu.txt")
    pinned = {
        wanted.name: wanted.specifier
        for wanted in map(Requirement, requires("sglang") or [])
        if str(wanted.specifier).startswith("==")
    }
    assert set(everywhere) & set(on_cpu) <= set(pinned)
    for name in set(on_cpu) & set(pinned):
        assert on_cpu[name].specifier == pinned[name], name
    assert str(on_cpu["transformers"].specifier) == f"=={pin('transformers')}"


@pytest.mark.parametrize(
    ("kind", "name"), [("cpu", "image_cpu"), ("cuda", "image_cuda"), ("rocm", "image_rocm_gfx942")]
)
def test_a_dockerfile_starts_from_the_pinned_image(kind: str, name: str) -> None:
    bases = re.findall(
        r"^ARG BASE=(\S+)$", (ROOT / f"docker/Dockerfile.{kind}").read_text(), re.MULTILINE
    )
    assert bases == [pin(name)]


def test_no_other_file_names_a_pinned_version() -> None:
    """Of what installs: sources and docs may tell in which version something was found."""
    pinned = [
        value
        for name, value in pins().items()
        if name in ("torch", "sglang", "megatron_core", "ray", "transformers")
    ]
    for file in [
        "Makefile",
        "docker/install.sh",
        "docker/requirements.txt",
        "docker/requirements-cpu.txt",
    ]:
        text = (ROOT / file).read_text()
        assert not [
            version
            for version in pinned
            if re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", text)
        ], file


def test_a_shell_reads_the_pins_as_python_does() -> None:
    script = "set -a; . docker/pins.env; set +a; env -0"
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=ROOT,
        env={},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    seen = dict(line.split("=", 1) for line in done.stdout.split("\0") if line.startswith("PIN_"))
    assert {f"PIN_{name.upper()}": value for name, value in pins().items()} == seen


def test_make_reads_the_pins_as_python_does() -> None:
    done = subprocess.run(
        ["make", "-s", "-f", "-"],
        input="include docker/pins.env\nall: ; @echo $(PIN_TORCH) $(PIN_IMAGE_CUDA)\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == [pin("torch"), pin("image_cuda")]


def test_a_wheel_carries_the_pins_where_they_are_looked_for_first() -> None:
    carried = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert carried[str(pins_file().relative_to(ROOT))] == "milescli/pins.env"


def test_a_name_that_is_not_pinned_is_our_mistake() -> None:
    with pytest.raises(KeyError, match="tensorflow"):
        pin("tensorflow")


@pytest.mark.parametrize("argv", [["venv", "tpu"], ["venv", "cpu", "everything"], []], ids=" ".join)
def test_the_installer_refuses_before_it_makes_anything(argv: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "docker/install.sh"), *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ},
    )
    assert done.returncode and "docker/install.sh" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_installer_refuses_another_python(tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.10.1"\nexit 1\n')
    old.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(old)}
    command = [str(ROOT / "docker/install.sh"), str(tmp_path / "venv"), "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 4
    assert "is Python 3.10.1" in done.stderr and f"below {pin('python_below')}" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_on_rocm_the_images_own_torch_and_sglang_are_seen(tmp_path: Path) -> None:
    """Also where the image keeps them in a virtual environment. Nothing is downloaded: pip of the
    new one only notes what it is asked for."""
    image, venv = tmp_path / "image", tmp_path / "venv"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(image)], timeout=200, check=True
    )
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(venv)], timeout=200, check=True
    )
    (packages,) = image.glob("lib/python*/site-packages")
    (packages / "torch.py").write_text("class version: hip = '7.2.4'")
    (packages / "sglang.py").touch()
    (venv / "bin/pip").write_text('#!/bin/sh\necho "$@" >>"$0.log"\n')
    (venv / "bin/pip").chmod(0o755)
    command = [str(ROOT / "docker/install.sh"), str(venv), "rocm"]
    subprocess.run(
        command, env={**os.environ, "PYTHON": str(image / "bin/python")}, timeout=200, check=True
    )
    subprocess.run(
        [str(venv / "bin/python"), "-c", "import torch, sglang; assert torch.version.hip"],
        timeout=200,
        check=True,
    )
    asked = (venv / "bin/pip.log").read_text()
    assert "docker/requirements.txt" in asked and f"--no-deps -e {ROOT}" in asked
    assert "torch" not in asked and "sglang" not in asked


def test_rocm_without_its_torch_is_refused_with_the_image_that_has_it(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")],
        timeout=200,
        check=True,
    )
    environment = {**os.environ, "PYTHON": str(tmp_path / "bare/bin/python")}
    done = subprocess.run(
        [str(ROOT / "docker/install.sh"), str(tmp_path / "venv"), "rocm"],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
    )
    assert done.returncode == 4 and pin("image_rocm_gfx942") in done.stderr
    assert not (tmp_path / "venv").exists()
