"""Run folders with checkpoints, made without a run; for the tests of several rooms."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from milescli.checkpoint.base import CheckpointManifest
from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.store import CheckpointStore
from milescli.recipe.load import load
from milescli.recipe.resolved import resolved_yaml


def manifest_of(step: int) -> CheckpointManifest:
    """Of a checkpoint whose step alone matters."""
    return CheckpointManifest(
        format="torch_dist",
        step=step,
        version=step,
        prompt_position=step * 8,
        seed=0,
        plan_fingerprint="f",
        recipe_sha256="r",
        data_sha256="d",
        layout={"tp": 1},
        created="2026-01-01T00:00:00Z",
        miles_version="0",
        size_bytes=0,
        files={},
    )


def make_run(path: Path, *, model_dir: Path) -> RunDir:
    """A run of the model in `model_dir`, without checkpoints."""
    path.mkdir(parents=True)
    run, sets = RunDir(path), [f"model.path={model_dir}", "model.scratch=null"]
    loaded = load("quickstart", sets=sets, environ={}, cwd=path, home=path)
    run.recipe_file.write_text(resolved_yaml(loaded))
    manifest = {"miles": "0.1.0", "packages": {}, "model_dir": str(model_dir)}
    run.manifest_file.write_text(json.dumps(manifest))
    return run


def add_checkpoint(run: RunDir, step: int, *, tensors: Path) -> None:
    """Copy a `torch_dist` folder in as the run's checkpoint of a step."""
    store = CheckpointStore(run.checkpoints)
    shutil.copytree(tensors, store.begin(step), dirs_exist_ok=True)
    store.complete(step, manifest_of(step))
