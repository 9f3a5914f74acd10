"""A torch that is built for other devices is refused by its version."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from milescli.core.errors import MachineError
from milescli.platform.machine import Kind
from milescli.platform.torch_wheel import built_for, require_wheel
from tests.platform.tools_on_paper import FOLDER

VERSIONS: dict[str, Kind] = {
    "2.13.0+cpu": "cpu",
    "2.13.0": "cuda",
    "2.13.0+cu130": "cuda",
    "2.11.0+rocm7.0": "rocm",
    "2.11.0+rocm7.2.4.git1234": "rocm",
    "2.13.0+cpu.cxx11.abi": "cpu",
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm"])
def test_a_build_serves_its_own_devices_and_every_cpu(version: str, kind: Kind) -> None:
    assert built_for(version) == VERSIONS[version]
    if kind in ("cpu", VERSIONS[version]):
        require_wheel(kind, version_of=lambda _: version)
        return
    with pytest.raises(MachineError, match="this torch is not built for") as error:
        require_wheel(kind, version_of=lambda _: version)
    assert version in error.value.why and error.value.fixes[0] == f"docker/install.sh .venv {kind}"


@pytest.mark.skipif(
    built_for(importlib.metadata.version("torch")) == "cuda", reason="this torch is built for CUDA"
)
def test_a_launch_refuses_it_before_anything_is_made(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\ncase $1 in --query*) cat {FOLDER}/nvidia_query.txt;; topo) cat "
        f"{FOLDER}/nvidia_topo.txt;; esac\n"
    )
    tool.chmod(0o755)
    environ = {
        key: value for key, value in os.environ.items() if not key.endswith("VISIBLE_DEVICES")
    }
    environ["PATH"] = f"{tmp_path}{os.pathsep}{environ['PATH']}"
    command = [
        sys.executable,
        "-m",
        "milescli",
        "launch",
        "--recipe",
        "quickstart",
        "--set",
        f"run.dir={tmp_path}/runs",
    ]
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 4 and "this torch is not built for NVIDIA GPUs" in done.stderr, (
        done.stderr
    )
    assert not (tmp_path / "runs").exists()
