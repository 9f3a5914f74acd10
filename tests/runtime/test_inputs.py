"""Tests of what a run takes in: bad input is refused before any process starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import DataError
from milescli.recipe.load import load
from milescli.runtime.inputs import prepare

TINY = """\
model:
  scratch: {hidden_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 16,
            ffn_hidden_size: 128}
"""


def _prepare(folder: Path, *, reward: str, prompts: list[str], heldout: list[str]) -> None:
    """Labels of the training prompts and of the held-out ones."""
    for name, labels in (("train", prompts), ("test", heldout)):
        rows = [
            json.dumps({"prompt": f"{name} {row}", "label": label})
            for row, label in enumerate(labels)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    (folder / "my.yaml").write_text(TINY)
    sets = [
        f"data.prompts={folder}/train.jsonl",
        f"data.eval={folder}/test.jsonl",
        f"rollout.reward={reward}",
    ]
    loaded = load("my.yaml", sets=sets, environ={}, cwd=folder, home=folder)
    prepare(loaded.recipe, RunDir(path=folder / "run"))


@pytest.mark.parametrize("reward", ["math", "gsm8k"])
def test_a_label_that_the_reward_cannot_grade_is_refused_with_file_and_line(
    tmp_path: Path, reward: str
) -> None:
    with pytest.raises(DataError, match=r"1 of 3 prompts of .*train\.jsonl .*line 2: the label"):
        _prepare(tmp_path, reward=reward, prompts=["1", "so #### ", "3"], heldout=["4"])


def test_labels_of_held_out_prompts_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 of 2 prompts of .*test\.jsonl .*line 1: the label"):
        _prepare(tmp_path, reward="gsm8k", prompts=["1"], heldout=["four", "5"])


def test_what_can_be_graded_is_taken_in(tmp_path: Path) -> None:
    _prepare(tmp_path, reward="math", prompts=["1", r"\$36"], heldout=["x + 1"])
