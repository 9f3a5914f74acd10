"""`miles import`: what it takes for files, and where it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.conftest import Miles

SCRIPT = """\
python3 -m verl.trainer.main_ppo data.train_files=train.parquet \\
    actor_rollout_ref.model.path=Qwen/Qwen3-0.6B actor_rollout_ref.actor.optim.lr=3e-6
"""


@pytest.fixture
def script(miles: Miles) -> str:
    """A script below a folder whose name looks like an override."""
    Path("lr=1e-6").mkdir()
    Path("lr=1e-6", "run.sh").write_text(SCRIPT)
    return "lr=1e-6/run.sh"


def test_a_file_is_none_of_the_words_of_a_command_line(miles: Miles, script: str) -> None:
    said = miles("import", script, "actor_rollout_ref.actor.optim.lr=4e-6")
    assert said.code == 0, said.err
    assert "lr: 4" in said.out and "Qwen/Qwen3-0.6B" in said.out
    for word in ("~trainer.foo=1", f"data.system_prompt={'word ' * 60}"):
        assert miles("import", script, word).code == 0


def test_a_recipe_is_written_below_a_folder_that_exists(miles: Miles, script: str) -> None:
    said = miles("import", script, "--to", "my recipes/one.yaml")
    assert said.code == 4 and "fix: mkdir -p 'my recipes'" in said.err
    Path("my recipes").mkdir()
    said = miles("import", script, "--to", "my recipes/one.yaml")
    assert said.code == 0 and "--recipe 'my recipes/one.yaml'" in said.err
    said = miles("import", script, "--to", "my recipes/one.yaml")
    assert said.code == 3 and "fix: --to 'my recipes/one-2.yaml'" in said.err
