"""transformers in the environment that miles is installed into: as users import it, and as our
witness."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from milescli.backends.transformers.logits import logits
from milescli.models.scratch import make_model
from milescli.recipe.model import ScratchModel

LOAD = """\
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
print(type(model).__name__, model(model.dummy_inputs["input_ids"] % 64).logits.isfinite().all())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Qwen3."""
    sizes = {"vocab_size": 512, "hidden_size": 32, "ffn_hidden_size": 32, "num_layers": 1}
    make_model(ScratchModel(**sizes), tmp_path / "model", 0)
    return tmp_path / "model"


def test_what_users_import_from_transformers_works_where_miles_is_installed(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.stdout == "Qwen3ForCausalLM tensor(True)\n", done.stderr


def test_logits_of_a_row_do_not_depend_on_the_others(folder: Path) -> None:
    rows = [[5, 77, 130], [8, 250, 33, 91]]
    both = logits(folder, rows, dtype=torch.float32)
    assert [tuple(row.shape) for row in both] == [(3, 512), (4, 512)]
    assert torch.equal(both[1], logits(folder, rows[1:], dtype=torch.float32)[0])
