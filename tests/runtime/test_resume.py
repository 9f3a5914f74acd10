"""What `miles resume` finds in a run's folder before it continues."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.store import CheckpointStore
from milescli.console.output import Mode, Output
from milescli.core.errors import RecipeError
from milescli.recipe.load import load
from milescli.recipe.resolved import resolved_yaml
from milescli.runtime.resume import resume
from tests.checkpoint.making import manifest_of


def test_a_checkpoint_that_a_killed_save_was_to_replace_is_found(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    sets = ["train.steps=1"]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    run.recipe_file.write_text(resolved_yaml(loaded))
    run.manifest_file.write_text("{}")
    store = CheckpointStore(run.checkpoints)
    (store.begin(1) / "tensors.bin").write_bytes(b"x")
    store.complete(1, manifest_of(1))
    store.begin(1)
    with pytest.raises(RecipeError, match="has completed all 1 steps"):
        resume(
            run.path,
            steps=None,
            sets=[],
            address=None,
            environ=os.environ,
            output=Output(Mode.QUIET),
        )
    assert store.find(None).step == 1
