"""RUN, as a user types it, where it cannot be read."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from milescli.commands.find_run import find_run
from milescli.core.errors import ExitCode, MachineError
from milescli.insight.run_state import UNREADABLE, RunStates
from tests.fake_run import WrittenRun

NOBODY = 65534


def _as_somebody_else(told: Connection, run: Path) -> None:
    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        find_run(str(run), folder=run.parent)
    except MachineError as error:
        told.send(error)
    told.close()


def test_a_run_whose_files_alone_are_somebody_elses_is_neither_shown_nor_called_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that others may enter, made with a umask of 077: without its events it was said to
    be running, at step 0."""
    run = WrittenRun(path=tmp_path / "theirs")
    run.steps(1, 3)
    assert find_run("theirs", folder=tmp_path) == run.path
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != run.run.events_file and access(path, mode)
    )
    with pytest.raises(MachineError, match="cannot be read"):
        find_run("theirs", folder=tmp_path)
    assert RunStates().of(run.run).state == UNREADABLE


def test_a_run_that_is_somebody_elses_is_refused_with_what_opens_it(tmp_path: Path) -> None:
    run = tmp_path / "theirs"
    run.mkdir()
    (run / "recipe.yaml").write_text("")
    run.chmod(0o700 if os.getuid() == 0 else 0o000)
    context = multiprocessing.get_context("fork")  # who is another user could import nothing here
    ours, theirs = context.Pipe()
    process = context.Process(target=_as_somebody_else, args=(theirs, run))
    process.start()
    theirs.close()
    try:
        assert ours.poll(120), "the other user says nothing"
        refused = ours.recv()
    finally:
        process.join(120)
        run.chmod(0o700)
    assert "cannot be read" in refused.what and "chmod -R a+rX" in refused.fixes[0]
    assert refused.exit_code is ExitCode.NOT_READY
