"""Ids of runs, and folders that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from milescli.core.errors import ExitCode, MachineError
from milescli.web.responses import NotFound
from milescli.web.shown import ShownRuns, shown_runs
from tests.fake_run import WrittenRun


def test_runs_of_one_name_have_different_ids(tmp_path: Path) -> None:
    paths = [WrittenRun(path=tmp_path / place / "tiny-1").path for place in ("a", "b", "c")]
    runs = ShownRuns(named=paths)
    assert [run.id for run in runs.all()] == ["tiny-1", "tiny-1-2", "tiny-1-3"]
    assert runs.find("tiny-1-2").run.path == paths[1]


def test_an_adapter_that_is_named_is_a_run(tmp_path: Path) -> None:
    run = WrittenRun(path=tmp_path / "tiny-1")
    own = WrittenRun(path=run.run.adapters_dir / "sums")
    assert [one.id for one in ShownRuns(named=[own.path]).all()] == ["tiny-1-sums"]


def test_a_name_with_a_colon_is_found(tmp_path: Path) -> None:
    WrittenRun(path=tmp_path / "a:b")
    assert ShownRuns(folder=tmp_path).find("a:b").parent is None


def test_a_wrong_name_is_told_the_nearest(tmp_path: Path) -> None:
    WrittenRun(path=tmp_path / "tiny-1")
    with pytest.raises(NotFound, match="tiny-1"):
        ShownRuns(folder=tmp_path).find("tinny-1")


def test_a_folder_that_is_not_there_yet_has_no_runs(tmp_path: Path) -> None:
    assert shown_runs(tmp_path / "runs", []).all() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    run = WrittenRun(path=tmp_path / "runs" / "tiny-1")
    run.path.chmod(0o000)
    with pytest.raises(MachineError) as refused:
        shown_runs(None, [run.path])
    assert refused.value.exit_code is ExitCode.NOT_READY
    run.path.chmod(0o700)


@pytest.mark.parametrize("folder", ["runs", "runs/below"])
def test_what_is_no_folder_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(MachineError, match="cannot be read"):
        shown_runs(tmp_path / folder, [])
