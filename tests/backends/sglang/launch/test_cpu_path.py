"""Tests of the stand-ins on a CPU engine's path, each in a process as SGLang's is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from milescli.backends.sglang.launch.command import CPU_PATH


def _run(code: str, *further: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (CPU_PATH, *further)))
    environment = {**os.environ, "PYTHONPATH": path}
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


@pytest.mark.slow
def test_an_engine_starts_where_scikit_learn_is_installed(tmp_path: Path) -> None:
    """It needs the scipy that the stand-in replaces, and transformers imports it if it is there."""
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text("")
    (tmp_path / "sklearn" / "metrics.py").write_text(
        "import scipy.sparse\nscipy.sparse.issparse(1)"
    )
    done = _run("from transformers import AutoProcessor", tmp_path)
    assert done.returncode == 0, done.stderr
