"""A fork shares the files of a checkpoint and nothing that is written on; what does not fit the
checkpoint is refused. That it computes what its trunk does: tests/end_to_end/test_life_of_a_run.py.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.run_lock import lock
from milescli.checkpoint.store import CheckpointStore, restore_recipe
from milescli.console.output import Mode, Output
from milescli.core.errors import CheckpointError, MilesError, RecipeError
from milescli.insight.run_state import RunStates
from milescli.recipe.resolved import load_resolved
from milescli.runtime.fork import Fork, fork
from tests.checkpoint.making import add_checkpoint, make_run


@pytest.fixture
def trunk(tmp_path: Path) -> RunDir:
    """A run with two checkpoints, and what a run writes on."""
    run, tensors = make_run(tmp_path / "runs" / "trunk", model_dir=tmp_path), tmp_path / "tensors"
    tensors.mkdir()
    (tensors / "__0_0.distcp").write_bytes(bytes(1000))
    for step in (3, 6):
        add_checkpoint(run, step, tensors=tensors)
    for folder in (run.own_model_dir, run.data_dir, run.journal_dir):
        folder.mkdir()
        (folder / "some").write_text("of the trunk")
    (run.journal_dir / "collector-0").mkdir()
    (run.journal_dir / "collector-0" / "1.journal").write_text("of another process")
    run.critic_model_dir.mkdir()
    os.symlink("../model/some", run.critic_model_dir / "linked")
    os.symlink(tmp_path / "outside", run.critic_model_dir / "outside")
    (tmp_path / "outside").write_text("of nobody's run")
    run.events_file.write_text("")
    run.tracking_id()
    return run


def forked(trunk: RunDir, *sets: str, step: int | None = 3, name: str | None = "branch") -> Fork:
    quiet = Output(Mode.QUIET)
    return fork(trunk.path, step=step, name=name, steps=None, sets=list(sets), output=quiet)


def test_a_fork_shares_the_checkpoint_and_outlives_its_trunk(trunk: RunDir) -> None:
    made = forked(trunk)
    file = made.run.checkpoints / "step_3" / "__0_0.distcp"
    assert os.path.samefile(file, trunk.checkpoints / "step_3" / "__0_0.distcp")
    assert made.linked_bytes == 1000 + 2 * len("of the trunk") and made.copied_bytes == 0
    shutil.rmtree(trunk.path)
    assert CheckpointStore(made.run.checkpoints).find(None).step == 3
    for file in (made.run.own_model_dir / "some", made.run.critic_model_dir / "linked"):
        assert file.read_text() == "of the trunk"
    assert (made.run.critic_model_dir / "outside").is_symlink()
    journal = made.run.journal_dir / "collector-0" / "1.journal"
    assert journal.read_text() == "of another process"
    assert load_resolved(made.run.recipe_file).recipe.run.name == "branch"


def test_what_a_run_writes_on_is_the_forks_own(trunk: RunDir) -> None:
    made = forked(trunk)
    assert not made.run.events_file.exists()
    assert made.run.tracking_id() != trunk.tracking_id()
    for folder in ("data", "journal"):
        (made.run.path / folder / "some").write_text("of the fork")
        assert (trunk.path / folder / "some").read_text() == "of the trunk"


def test_a_fork_that_learns_otherwise_takes_no_samples_of_its_trunk(trunk: RunDir) -> None:
    made = forked(trunk, "train.optimizer.lr=2e-3")
    assert not made.run.journal_dir.exists()
    assert load_resolved(made.run.recipe_file).recipe.train.optimizer.lr == 2e-3
    [line] = made.changed
    assert line.startswith("train.optimizer.lr: ") and line.endswith(" -> 0.002")


def test_an_algorithm_brings_its_row(trunk: RunDir) -> None:
    made = forked(trunk, "train.algorithm=gspo")
    assert load_resolved(made.run.recipe_file).recipe.train.ratio == "sequence"


def test_a_lost_recipe_is_restored_as_the_forks(trunk: RunDir) -> None:
    made = forked(trunk, "train.optimizer.lr=2e-3")
    before = made.run.recipe_file.read_text()
    made.run.recipe_file.unlink()
    assert restore_recipe(made.run.path) and made.run.recipe_file.read_text() == before


def test_the_lineage_is_listed_and_a_fork_of_a_fork_names_its_own_trunk(trunk: RunDir) -> None:
    first = forked(trunk)
    second = forked(first.run, step=None, name=None)
    states = {one.name: one.forked_from for one in map(RunStates().of, (trunk, first.run))}
    assert states == {"trunk": "", "branch": "trunk @ step 3"}
    assert RunStates().of(second.run).forked_from == "branch @ step 3"
    assert second.run.name == "branch-fork-1"


def test_a_run_that_goes_on_can_be_forked(trunk: RunDir) -> None:
    (trunk.checkpoints / "step_9").mkdir()  # is being written
    with lock(trunk):
        assert forked(trunk, step=None).step == 6


def test_a_file_system_without_links_gets_copies(
    trunk: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    made = forked(trunk)
    assert made.linked_bytes == 0 and made.copied_bytes == 1000 + 2 * len("of the trunk")
    assert CheckpointStore(made.run.checkpoints).find(3).step == 3


@pytest.mark.parametrize(
    ("sets", "step", "name", "error", "said"),
    [
        ((), 4, "branch", CheckpointError, "complete: 3, 6"),
        ((), 3, "trunk", RecipeError, "in use"),
        (("model.path=other",), 3, "branch", RecipeError, "`model.path` cannot change"),
        (("run.seed=7",), 3, "branch", RecipeError, "`run.seed` cannot change"),
        (("train.precision=bf16",), 3, "branch", RecipeError, "`train.precision` cannot change"),
        (("train.algorithm=ppo",), 3, "branch", RecipeError, "`train.credit` cannot change"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(
    trunk: RunDir, sets: tuple[str, ...], step: int, name: str, error: type[MilesError], said: str
) -> None:
    with pytest.raises(error) as caught:
        forked(trunk, *sets, step=step, name=name)
    assert said in f"{caught.value.what} {caught.value.why}"
    assert [path.name for path in trunk.path.parent.iterdir()] == ["trunk"]


def test_a_reference_that_the_trunk_did_not_keep_is_refused_with_a_new_run(
    trunk: RunDir, tmp_path: Path
) -> None:
    """Any other checkpoint of the trunk would lack it, too."""
    change = "train.kl_coef=0.1"
    with pytest.raises(RecipeError, match="needs a reference") as caught:
        forked(trunk, "train.kl_coef=0", change)
    (fix,) = caught.value.fixes
    recipe = f"miles launch --recipe {trunk.recipe_file} --name NEW --set train.kl_coef=0 "
    assert fix.startswith(f"{recipe}--set {change} ")
    assert [path.name for path in trunk.path.parent.iterdir()] == ["trunk"]
    add_checkpoint(trunk, 0, tensors=tmp_path / "tensors")
    assert (forked(trunk, change).run.checkpoints / "step_0").is_dir()


def test_a_damaged_checkpoint_is_refused_with_the_file_that_is(trunk: RunDir) -> None:
    (trunk.checkpoints / "step_6" / "__0_0.distcp").write_bytes(b"1" * 1000)
    with pytest.raises(CheckpointError, match="modified after it was written") as caught:
        forked(trunk, step=6)
    assert caught.value.fixes[0].startswith("--step 3")


def test_the_lineage_outlives_a_changed_recipe(trunk: RunDir) -> None:
    record = json.loads(forked(trunk, "rollout.temperature=0.7").run.manifest_file.read_text())
    assert record["forked_from"]["changed"] == {"rollout.temperature": [1.0, 0.7]}
    assert record["recipe"]["rollout.temperature"] == 0.7
