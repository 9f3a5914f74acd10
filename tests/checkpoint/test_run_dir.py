"""The run directory: new ones never hide old ones, and only one driver works on one."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir, create, open_run, step_saved, verdict_file
from milescli.checkpoint.run_lock import lock
from milescli.core.errors import CheckpointError, ExitCode, MachineError, MilesError, RecipeError


def test_names_count_up(tmp_path: Path) -> None:
    first = create(base=tmp_path, recipe_name="quickstart", name=None)
    second = create(base=tmp_path, recipe_name="quickstart", name=None)
    assert (first.name, second.name) == ("quickstart-1", "quickstart-2")


@pytest.mark.parametrize(
    ("outcome", "what", "fixes"),
    [
        ("failed", "in use", ["miles resume {}   # go on", "--name mine-", "mv {} {}.old"]),
        (
            "stopped",
            "in use",
            ["miles resume {}   # continue the stopped run", "--name mine-", "mv {} "],
        ),
        ("done", "in use", ["miles resume {} --steps N", "--name mine-", "mv {} "]),
        ("no run", "in use", ["--name mine-", "mv {} "]),
        ("running", "running", ["miles status {} --watch", "miles stop {} ", "--name mine-"]),
    ],
)
def test_a_used_directory_is_refused_with_the_ways_out_of_its_state(
    tmp_path: Path, outcome: str, what: str, fixes: list[str]
) -> None:
    run = create(base=tmp_path, recipe_name="r", name="mine")
    (run.path / ("x" if outcome == "no run" else "recipe.yaml")).touch()
    if outcome not in ("no run", "running"):
        verdict_file(run.new_attempt()).write_text(f'{{"outcome": "{outcome}"}}\n')
    held = lock(run) if outcome == "running" else nullcontext()
    with held, pytest.raises(RecipeError, match=what) as caught:
        create(base=tmp_path, recipe_name="r", name="mine")
    assert caught.value.exit_code is ExitCode.INVALID
    begins = [fix.format(run.shown, run.shown) for fix in fixes]
    assert len(caught.value.fixes) == len(begins)
    for fix, begin in zip(caught.value.fixes, begins, strict=True):
        assert fix.startswith(begin)


@pytest.mark.parametrize("name", ["a/b", "../up", ".hidden", "x" * 300])
def test_a_name_cannot_leave_the_runs_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError):
        create(base=tmp_path, recipe_name="r", name=name)


def test_a_new_run_can_be_read_by_its_owner_alone_and_an_empty_folder_keeps_its_rights(
    tmp_path: Path,
) -> None:
    run = create(base=tmp_path, recipe_name="r", name=None)
    assert run.path.stat().st_mode & 0o777 == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    assert create(base=tmp_path, recipe_name="r", name="shared").path.stat().st_mode & 0o077


def test_where_nothing_can_be_written_is_said_in_three_parts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be created") as caught:
        create(base=tmp_path / "file", recipe_name="r", name="a")
    assert caught.value.exit_code is ExitCode.NOT_READY and caught.value.fixes
    run = create(base=tmp_path, recipe_name="r", name="b")
    (run.path / ".lock").mkdir()  # as root, rights alone would keep nobody out
    with pytest.raises(MachineError, match="is not writable"), lock(run):
        pass


def test_logs_latest_points_to_the_newest_attempt(tmp_path: Path) -> None:
    run = create(base=tmp_path, recipe_name="r", name=None)
    for number in range(1, 12):
        assert run.new_attempt().name == f"attempt_{number}"
    assert (run.path / "logs" / "latest").resolve().name == "attempt_11"
    (run.path / "logs" / "attempt_old").mkdir()
    assert [one.name for one in run.attempts()] == [f"attempt_{n}" for n in range(1, 12)]
    (run.path / "logs" / "attempt_3").rmdir()
    assert run.new_attempt().name == "attempt_12", "old logs may be deleted"


def test_a_second_driver_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    run = create(base=tmp_path, recipe_name="r", name=None)
    with (
        lock(run),
        pytest.raises(MilesError, match=re.escape(f"run `{run.name}` is running")),
        lock(run),
    ):
        pass
    with lock(run):
        pass


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        open_run(tmp_path)
    with pytest.raises(CheckpointError):
        open_run(tmp_path / "missing")


def test_only_an_unused_directory_is_discarded(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "used")
    run.checkpoints.mkdir(parents=True)
    run.discard_if_unused()
    assert run.path.exists()
    empty = create(base=tmp_path, recipe_name="r", name=None)
    empty.discard_if_unused()
    assert not empty.path.exists()


def test_what_is_saved_of_several_is_what_the_last_of_them_has_saved() -> None:
    """Of those that are not done, as the others wait for nobody."""

    def said(kind: str, adapter: str | None, step: int) -> dict[str, object]:
        about = {"event": kind, "step": step, "num_steps": {"a": 3, "b": 12}.get(str(adapter), 5)}
        return about if adapter is None else {**about, "adapter": adapter}

    assert step_saved([]) is None
    assert step_saved([said("StepDone", None, 4)]) is None
    alone = [said("CheckpointSaved", None, step) for step in (0, 2, 5)]
    assert step_saved([*alone, said("StepDone", None, 5)]) == 5
    first = [said(kind, "a", 3) for kind in ("StepDone", "CheckpointSaved")]
    begun = [said("CheckpointSaved", name, 0) for name in "ab"]
    assert step_saved([*begun, *first]) == 0
    second = [said("StepDone", "b", 7), said("CheckpointSaved", "b", 6)]
    assert step_saved([*begun, *first, *second]) == 6, "`a` is done"
    assert step_saved([*begun, *first, *second, said("CheckpointSaved", "b", 12)]) == 12
