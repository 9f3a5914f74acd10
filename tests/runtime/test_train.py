"""What ended a run is told as what it is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import Interrupted, MachineError, Stopped, WorkerDied
from milescli.runtime.train import explain_error, offer_resume


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_fault_of_ours(tmp_path: Path, number: int) -> None:
    error = explain_error(OSError(number, "No space left on device"), RunDir(tmp_path / "mine"))
    assert isinstance(error, MachineError) and error.what == "the disk is full"
    assert "No space left" in error.why and "are free" in error.why


def test_anything_else_is_itself(tmp_path: Path) -> None:
    for error in (OSError(errno.EACCES, "Permission denied"), ValueError("ours")):
        assert explain_error(error, RunDir(tmp_path)) is error


def test_a_ctrl_c_while_a_run_ends_says_how_to_go_on(tmp_path: Path) -> None:
    error = explain_error(KeyboardInterrupt(), RunDir(tmp_path / "mine"))
    assert isinstance(error, Interrupted) and error.exit_code == 130
    assert error.fixes[0].startswith(
        f"miles resume {tmp_path / 'mine'}   # starts from the beginning"
    )


def test_a_ctrl_c_while_a_run_ends_changes_nothing_of_what_ended_it(tmp_path: Path) -> None:
    saved = Stopped("stopped after step 3, and saved", why="Ctrl-C", fix="miles resume mine")
    with pytest.raises(KeyboardInterrupt) as caught:
        try:
            raise saved
        finally:
            raise KeyboardInterrupt
    assert explain_error(caught.value, RunDir(tmp_path / "mine")) is saved


@pytest.mark.parametrize(
    ("step", "where"),
    [
        (None, "starts from the beginning: it had saved nothing"),
        (0, "goes on where it was saved, before step 1"),
        (4, "goes on from step 4"),
    ],
)
def test_a_death_says_how_to_go_on_also_where_nothing_was_saved_yet(
    step: int | None, where: str
) -> None:
    error = WorkerDied("engine 0 ended while it started", why="exit code 1", fix="less its.log")
    offer_resume(error, "runs/mine", step=step)
    assert error.fixes[:2] == ["less its.log", f"miles resume runs/mine   # {where}"]
    assert error.fixes[2].startswith("miles why runs/mine")
