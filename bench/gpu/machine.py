"""Where a visit's figures were made: device, versions, commit. `visit.py` runs it in a process of
its own, since it opens the device: `python machine.py` prints one line of JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("torch", "sglang", "sglang-kernel", "megatron-core", "ray", "transformers", "triton")


def describe() -> dict[str, object]:
    """Name -> value; packages that are missing are null."""
    import torch

    on_device = torch.cuda.is_available()
    return {
        "device_name": torch.cuda.get_device_name() if on_device else "CPU",
        "device_memory_bytes": torch.cuda.get_device_properties(0).total_memory if on_device else 0,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
        "commit": _commit(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _commit() -> str | None:
    """None where the files came without their history, or there is no git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return (
        subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip() or None
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(describe()))
