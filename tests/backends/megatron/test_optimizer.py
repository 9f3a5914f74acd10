"""Whole optimizer steps against plain PyTorch on the same model in transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.backends.megatron.conftest import Worlds
from tests.backends.megatron.layouts import ADAMW, ADAMW_LAYOUTS


@pytest.fixture(scope="module")
def plain(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Name -> weight after the three steps."""
    folder = tmp_path_factory.mktemp("plain")
    settings, out = folder / "settings.json", folder / "out.safetensors"
    settings.write_text(json.dumps(ADAMW))
    module = "tests.backends.megatron.plain_adamw"
    done = subprocess.run(
        [sys.executable, "-m", module, models["dense"], str(settings), str(out)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(out)


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, names in ADAMW_LAYOUTS.items() for name in names]
)
def test_three_steps_are_those_of_plain_pytorch_where_gains_do_not_decay(
    worlds: Worlds, models: dict[str, str], plain: dict, size: str, name: str
) -> None:
    worlds.get(size)[name]
    before = load_file(Path(models["dense"]) / "model.safetensors")
    after = load_file(worlds.adamw(name))
    assert set(after) == set(plain)
    for key, weight in plain.items():
        assert not torch.equal(after[key], before[key]), f"{key} did not learn"
        torch.testing.assert_close(after[key], weight, atol=1e-6, rtol=0, msg=key)
