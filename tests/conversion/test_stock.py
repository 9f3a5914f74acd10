"""What stock Megatron-Core makes of a converted checkpoint, under several layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conversion.making import (
    ROOT,
    to_megatron,
)
from tests.forked import run_module

ROWS = [[5, 9, 100, 3, 77, 42, 8], [1, 2], [17, 4, 4, 90, 12, 60, 61, 62]]


STOCK: dict[str, tuple[str, dict]] = {
    "tp 2, vocabulary padded to 256": ("qwen3", {"layout": {"tp": 2}}),
    "tp 2, tied": ("qwen3-tied", {"layout": {"tp": 2}}),
    "pp 2, uneven": ("qwen3", {"layout": {"pp": 2}, "stages": "Et|ttL"}),
    "pp 2, layers under names of their own": (
        "qwen3",
        {"layout": {"pp": 2}, "stages": "Ett|tL", "metadata": {"non_homogeneous_layers": True}},
    ),
    "pp 2, vpp 2": ("qwen3", {"layout": {"pp": 2, "vpp": 2}, "stages": "E|t|t|tL"}),
    "ep 2, one layer dense": ("qwen3-moe", {"layout": {"ep": 2}}),
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Name -> (logits that stock Megatron-Core computed, model folder with those of transformers);
    all jobs of two ranks in one world."""
    root = tmp_path_factory.mktemp("stock")
    names = ("qwen3", "qwen3-tied", "qwen3-moe")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    run_module("tests.families.making", root / "hf", *names)
    for name in names:
        to_megatron(root / "hf" / name, root / name)
    jobs = [
        {
            "name": name,
            "model": str(root / "hf" / model),
            "checkpoint": str(root / model / "release"),
            "rows": ROWS,
            "out": str(root / f"{name}.safetensors"),
            **rest,
        }
        for name, (model, rest) in STOCK.items()
    ]
    (root / "request.json").write_text(json.dumps({"store": str(root / "store"), "jobs": jobs}))
    command = [
        sys.executable,
        str(ROOT / "tests" / "conversion" / "stock.py"),
        str(root / "request.json"),
    ]
    logs = [(root / f"rank{rank}.log").open("wb") for rank in range(2)]
    ranks = [
        subprocess.Popen([*command, str(rank), "2"], env=environment, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    codes = []
    try:
        codes = [rank.wait(timeout=800) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    assert codes == [0, 0], (root / "rank0.log").read_text()[-3000:] + (
        root / "rank1.log"
    ).read_text()[-3000:]
    return {
        name: (root / f"{name}.safetensors", root / "hf" / model)
        for name, (model, _) in STOCK.items()
    }


@pytest.mark.parametrize("name", STOCK)
def test_stock_megatron_loads_the_checkpoint_and_computes_what_transformers_does(
    stock: dict[str, tuple[Path, Path]], name: str
) -> None:
    path, model = stock[name]
    actual, expected = load_file(path), load_file(model / "logits.witness")
    for key, row in actual.items():
        theirs = expected[key][: row.shape[0]]
        assert float((row - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())
