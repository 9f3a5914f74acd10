"""bench/gpu/faked.py: the kit's engine is imported as on a Hopper GPU, where the kit is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


def test_without_the_kit_it_says_how_to_unpack_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "bench/gpu/faked.py")],
        env={"PYTHONPATH": f"{stand_in_for_torch(tmp_path)}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 4 and "fix: source bench/gpu/unpack.sh all" in done.stderr


def stand_in_for_torch(folder: Path) -> Path:
    """An empty module of its name: without the kit nothing is asked of it."""
    (folder / "torch.py").touch()
    return folder


def test_the_engine_is_imported_and_takes_the_arguments_of_miles() -> None:
    if not list((ROOT / "bench/gpu/site").glob("part1/sgl_kernel/sm90/*.so")):
        pytest.skip("part 1 is not unpacked here: bench/gpu/unpack.sh 1")
    if not torch.__version__.startswith("2.11."):
        pytest.skip(f"the kit's kernel is for torch 2.11; here it is {torch.__version__}")
    script = f"source {ROOT}/bench/gpu/unpack.sh 1 && exec {sys.executable} bench/gpu/faked.py"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and all(row["ok"] for row in rows), rows[-1:]
    (arguments,) = [row for row in rows if row["kind"] == "arguments"]
    assert arguments["attention_backend"] == "triton"
    assert arguments["sampling_backend"] == "pytorch"
