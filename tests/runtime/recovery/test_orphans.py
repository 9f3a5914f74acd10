"""What a session has left, whose driver, parent and watchdog were all killed. Real processes that
carry its token, and no engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir, verdict_file
from milescli.checkpoint.run_lock import lock, state_of
from milescli.console.output import Mode, Output
from milescli.core.errors import MilesError
from milescli.core.run_processes import TOKEN_VARIABLE
from milescli.runtime.recovery.orphans import NOTE, locked_without_orphans, write_note

TOKEN = f"left-behind-{os.getpid()}"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """With one attempt, of which nobody said how it ended."""
    run = RunDir(tmp_path / "run")
    run.new_attempt()
    return run


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Where the session wrote beside the run."""
    with tempfile.TemporaryDirectory(
        prefix="miles-", dir="/tmp", ignore_cleanup_errors=True
    ) as name:
        (Path(name) / "t").mkdir()
        yield Path(name)


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the session, which SIGTERM does not end."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print(flush=True); input()",
        ],
        env={**os.environ, TOKEN_VARIABLE: TOKEN},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_processes_and_scratch_files_are_gone_and_the_attempt_was_killed(
    run: RunDir,
    scratch: Path,
    engine: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    [log_dir] = run.attempts()
    write_note(log_dir, token=TOKEN, scratch_dir=scratch)
    output = Output(Mode.QUIET)
    with locked_without_orphans(run, output=output):
        assert engine.poll() is not None
        assert not scratch.exists()
        with (
            pytest.raises(MilesError, match="is running"),
            locked_without_orphans(run, output=output),
        ):
            pass
    assert json.loads(verdict_file(log_dir).read_text())["outcome"] == "killed"
    assert state_of(run) == "killed"
    said = capsys.readouterr().err
    assert "the driver of logs/attempt_1 was killed, and it has no watchdog" in said
    with locked_without_orphans(run, output=output):
        pass
    assert capsys.readouterr().err == ""


def test_the_watchdog_that_is_still_at_work_is_waited_for(
    run: RunDir,
    scratch: Path,
    engine: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is another process's: of a driver that is killed the moment before."""
    [log_dir] = run.attempts()
    write_note(log_dir, token=TOKEN, scratch_dir=scratch)
    program = (
        "import sys; from pathlib import Path; from milescli.cluster.watchdog import *\n"
        "begun = start_watchdog(token=sys.argv[1], scratch_dirs=[Path(sys.argv[2])])\n"
        "begun.write_verdict_to(Path(sys.argv[3])); print(flush=True); input()"
    )
    said = [TOKEN, str(scratch), str(verdict_file(log_dir))]
    with subprocess.Popen(
        [sys.executable, "-c", program, *said], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        driver.kill()
    with locked_without_orphans(run, output=Output(Mode.HUMAN)):
        assert engine.poll() is not None and not scratch.exists()
    shown = " ".join(capsys.readouterr().err.split())
    assert (
        "the driver of logs/attempt_1 was killed: its watchdog is ending the remaining processes"
        in shown
    )
    assert json.loads(verdict_file(log_dir).read_text())["outcome"] == "killed"


def test_a_session_that_ended_in_order_is_not_spoken_of(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [log_dir] = run.attempts()
    write_note(log_dir, token=TOKEN, scratch_dir=tmp_path / "gone")
    with locked_without_orphans(run, output=Output(Mode.QUIET)):
        assert not verdict_file(log_dir).exists() and not (log_dir / NOTE).exists()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["elsewhere", "link", "torn", "no token", "above"])
def test_a_note_removes_nothing_else(run: RunDir, tmp_path: Path, scratch: Path, kind: str) -> None:
    [log_dir] = run.attempts()
    mine = tmp_path / "miles-mine"
    mine.mkdir()
    (mine / "file").touch()
    link = scratch.with_name(scratch.name + "link")
    notes = {
        "elsewhere": json.dumps({"token": TOKEN, "scratch_dir": str(mine)}),
        "link": json.dumps({"token": TOKEN, "scratch_dir": str(link)}),
        "torn": '{"token": "',
        "no token": json.dumps({"token": "", "scratch_dir": str(scratch)}),
        "above": json.dumps({"token": TOKEN, "scratch_dir": f"{scratch}/../{scratch.name}"}),
    }
    (log_dir / NOTE).write_text(notes[kind])
    link.symlink_to(mine)
    try:
        with locked_without_orphans(run, output=Output(Mode.QUIET)):
            assert (mine / "file").exists() and scratch.exists() and link.is_symlink()
    finally:
        link.unlink()


def test_folders_of_killed_chats_go_and_those_of_others_stay(run: RunDir, tmp_path: Path) -> None:
    killed, evaluated, open_ = (run.path / name for name in (".chat-a", ".eval-b", ".chat-c"))
    elsewhere = tmp_path / "elsewhere"
    for folder in (killed, evaluated, open_, elsewhere):
        (folder / "step_3").mkdir(parents=True)
    (run.path / ".chat-link").symlink_to(elsewhere)
    with lock(RunDir(open_)), locked_without_orphans(run, output=Output(Mode.QUIET)):
        assert not killed.exists() and not evaluated.exists()
        assert (open_ / "step_3").is_dir() and (elsewhere / "step_3").is_dir()
