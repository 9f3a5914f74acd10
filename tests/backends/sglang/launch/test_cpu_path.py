"""Tests of the stand-ins on a CPU engine's path, each in a process as SGLang's is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from milescli.backends.sglang.launch.command import CPU_PATH


def _run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(CPU_PATH)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=400
    )


@pytest.mark.parametrize(
    "code",
    [
        "from torchvision.io import decode_jpeg",
        "import torchvision.transforms.v2.functional as F; F.resize",
        "from torchvision.transforms import InterpolationMode, functional; "
        "InterpolationMode.BICUBIC.value",
        "import torchvision; torchvision.ops.nms",
    ],
)
def test_whatever_is_imported_from_torchvision_is_there(code: str) -> None:
    done = _run(code)
    assert done.returncode == 0, done.stderr


def test_what_is_called_says_that_it_is_missing() -> None:
    done = _run("import torchvision.ops; torchvision.ops.nms(1)")
    assert (
        "NotImplementedError: torchvision.ops.nms has no CPU implementation here, and"
        in done.stderr
    )
