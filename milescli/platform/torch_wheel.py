"""Checks by its version alone that the installed torch supports the plan's devices: torch is not
imported. Called before a run starts; `miles doctor` asks torch itself."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from milescli.core.errors import MachineError
from milescli.platform.faults import hide_command
from milescli.platform.machine import Kind


def built_for(version: str) -> Kind:
    """Return the kind of device of a torch version: 2.13.0+cpu, 2.13.0+rocm7.0, 2.13.0+cu130;
    2.13.0 alone is the CUDA build of PyPI."""
    build = version.partition("+")[2]
    return "cpu" if build.startswith("cpu") else "rocm" if build.startswith("rocm") else "cuda"


def require_wheel(
    kind: Kind, *, version_of: Callable[[str], str] = importlib.metadata.version
) -> None:
    """Raise MachineError if trainer ranks and engines on `kind` would find no device. Every build
    supports a CPU."""
    version = version_of("torch")
    if kind in ("cpu", built_for(version)):
        return
    raise MachineError(
        f"this torch is not built for {'NVIDIA' if kind == 'cuda' else 'AMD'} GPUs",
        why=f"torch {version} is built for {built_for(version)}, but the plan uses {kind} devices",
        fix=[f"docker/install.sh .venv {kind}", hide_command(kind)],
    )
