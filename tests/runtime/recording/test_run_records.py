"""What a resumed run finds changed since its last attempt: told, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.store import CheckpointStore
from milescli.core.errors import CheckpointError
from milescli.platform.machine import read_machine
from milescli.recipe.load import load, values_of
from milescli.recipe.resolved import load_resolved, resolved_yaml
from milescli.runtime.recording import run_records
from milescli.runtime.recording.run_records import MAY_CHANGE
from tests.checkpoint.making import manifest_of
from tests.plans import PLAN


def _begun(folder: Path) -> RunDir:
    """A run as its first attempt recorded it."""
    run = RunDir(folder)
    loaded = load("quickstart", environ={}, cwd=folder, home=folder)
    run.recipe_file.write_text(resolved_yaml(loaded))
    record = {"recipe_sha256": run.recipe_sha256, "recipe": values_of(loaded.recipe)}
    run.manifest_file.write_text(json.dumps(record))
    run.plan_file.write_text(PLAN.to_json())
    return run


def _edit(run: RunDir, old: str, new: str) -> list[str]:
    text = run.recipe_file.read_text()
    assert text.count(old) == 1
    run.recipe_file.write_text(text.replace(old, new))
    return run_records.edited_keys(run, load_resolved(run.recipe_file), may_change=MAY_CHANGE)


def test_an_edited_learning_rate_is_refused_with_both_values_and_the_way_to_a_new_run(
    tmp_path: Path,
) -> None:
    run = _begun(tmp_path)
    kept = load_resolved(run.recipe_file)
    assert run_records.edited_keys(run, kept, may_change=MAY_CHANGE) == []
    with pytest.raises(CheckpointError, match="was edited") as caught:
        _edit(run, "    lr: 0.0003", "    lr: 0.5")
    assert "train.optimizer.lr: 0.0003 -> 0.5" in caught.value.why
    assert caught.value.fixes[0].startswith("miles launch --recipe ")
    assert "train.optimizer.lr: 0.0003" in caught.value.fixes[1]


def test_what_may_change_and_what_says_the_same_is_no_reason_to_refuse(tmp_path: Path) -> None:
    run = _begun(tmp_path)
    assert _edit(run, "lr: 0.0003", "lr: 3.0e-4") == []
    keep = json.loads(run.manifest_file.read_text())["recipe"]["checkpoint.keep"]
    assert _edit(run, f"  keep: {keep}", "  keep: 7") == [f"checkpoint.keep: {keep} -> 7"]


def test_how_many_samples_are_kept_to_read_may_change(tmp_path: Path) -> None:
    run = _begun(tmp_path)
    assert _edit(run, "keep_groups: 4", "keep_groups: 0") == ["run.keep_groups: 4 -> 0"]


def test_a_recipe_edited_under_an_older_version_is_refused_too(tmp_path: Path) -> None:
    run = _begun(tmp_path)
    record = json.loads(run.manifest_file.read_text())
    del record["recipe"]
    run.manifest_file.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="was edited"):
        _edit(run, "    lr: 0.0003", "    lr: 0.5")
    run.manifest_file.unlink()
    kept = load_resolved(run.recipe_file)
    assert run_records.edited_keys(run, kept, may_change=MAY_CHANGE) == []


def test_other_packages_another_machine_and_another_layout_are_told(tmp_path: Path) -> None:
    run = _begun(tmp_path)
    before = run_records.run_conditions(read_machine("8xH200"))
    assert run_records.changes_since(before, before, plan=PLAN, run=run) == []
    now = before | {
        "packages": {**before["packages"], "torch": "0.0"},  # type: ignore[dict-item]
        "machine": run_records.describe_machine(read_machine("2x8xH200")),
    }
    wide = replace(PLAN, trainer=replace(PLAN.trainer, dp=2 * PLAN.trainer.dp))
    lines = run_records.changes_since(before, now, plan=wide, run=run)
    assert [line.partition(":")[0] for line in lines[:-1]] == ["torch", "machine", "trainer dp"]
    assert "-> 0.0" in lines[0] and "2 nodes" in lines[1] and f"-> {wide.trainer.dp}" in lines[2]
    assert "last bit" in lines[-1]


def test_a_record_that_cannot_be_read_is_no_reason_to_stop(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    now = run_records.run_conditions(read_machine("8xH200"))
    assert run_records.changes_since(run_records.read_record(run), now, plan=PLAN, run=run) == []


def test_a_lost_manifest_is_no_way_to_pass_an_edited_recipe(tmp_path: Path) -> None:
    run = _begun(tmp_path)
    store = CheckpointStore(run.checkpoints)
    store.begin(4)
    store.complete(4, replace(manifest_of(4), recipe_sha256=run.recipe_sha256))
    run.manifest_file.unlink()
    kept = load_resolved(run.recipe_file)
    assert run_records.edited_keys(run, kept, may_change=MAY_CHANGE) == []
    with pytest.raises(CheckpointError, match="was edited"):
        _edit(run, "    lr: 0.0003", "    lr: 0.5")
