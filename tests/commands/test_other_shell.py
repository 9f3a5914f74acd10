"""Runs are stopped, read and deleted from another shell."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir, is_locked
from milescli.checkpoint.run_lock import lock
from tests.commands.conftest import Miles
from tests.commands.test_runs import make_run
from tests.waiting import until

DRIVER = """
import signal, sys
from pathlib import Path
from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.run_lock import lock
came = []
wanted = int(sys.argv[2])
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: came.append(signal.Signals(number).name))
with lock(RunDir(Path(sys.argv[1]))):
    print("ready", flush=True)
    while len(came) < wanted:
        signal.sigtimedwait([], 0.05)
print(*sorted(came), flush=True)
"""


@contextlib.contextmanager
def driver(run: Path, *, ends_after: int) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of a run until so many signals came."""
    command = [sys.executable, "-c", DRIVER, str(run), str(ends_after)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("flags", "signals"), [([], "SIGTERM\n"), (["--now"], "SIGINT SIGTERM\n")])
def test_stop_signals_the_driver_and_waits_for_its_end(
    miles: Miles, flags: list[str], signals: str
) -> None:
    run = make_run("first", steps=3)
    with driver(run, ends_after=1 + len(flags)) as process:
        said = miles("stop", "first", "--json", *flags)
        assert process.stdout is not None and process.stdout.read() == signals
    assert said.code == 0 and said.result["was_running"] and not is_locked(RunDir(run))


def test_a_run_that_does_not_stop_in_time_is_told_of(miles: Miles) -> None:
    run = make_run("first", steps=3)
    with driver(run, ends_after=2) as process:
        said = miles("stop", "first", "--wait", "0.1")
        assert said.code == 1 and f"process {process.pid}" in said.err and "--now" in said.err
        process.send_signal(signal.SIGINT)


def test_a_process_that_does_not_hold_the_lock_is_never_signalled(miles: Miles) -> None:
    """Its number may be that of another container's driver."""
    run = make_run("first", steps=3)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with lock(RunDir(run)):
            (run / ".lock").write_text(f"{os.uname().nodename} {other.pid}\n")
            assert miles("stop", "first").code == 4
            (run / ".lock").write_text(f"elsewhere {other.pid}\n")
            assert "ssh elsewhere 'miles stop " in miles("stop", "first").err
        assert other.poll() is None
        other.communicate(b"\n")
        assert other.returncode == 0


def test_stopping_a_run_that_is_not_running_says_so(miles: Miles) -> None:
    make_run("first", outcome="done", steps=3)
    said = miles("stop", "first", "--json")
    assert (said.code, said.result["was_running"], said.result["state"]) == (0, False, "done")


def test_a_deleted_run_is_gone_and_others_are_not(miles: Miles) -> None:
    make_run("first", outcome="done", steps=3)
    make_run("second", steps=3)
    refused = miles("rm", "first")
    assert refused.code == 3 and "--yes" in refused.err and Path("runs/first").exists()
    assert miles("rm", "first", "runs/first", "--yes").code == 0
    assert [one.name for one in Path("runs").iterdir()] == ["second"]


def test_what_is_no_run_of_miles_is_not_deleted(miles: Miles) -> None:
    running, own = make_run("running", steps=3), make_run("own", steps=3)
    linked, adapter = Path("runs/linked"), make_run("several/adapters/one", steps=1)
    make_run("several", steps=1)
    linked.symlink_to(own.absolute())
    (own / "thesis.tex").write_text("years of work")
    recipes = Path("recipes")
    recipes.mkdir()
    (recipes / "recipe.yaml").write_text("train: {steps: 3}")
    with lock(RunDir(running)):
        for path in (running, own, linked, recipes, adapter):
            said = miles("rm", str(path), "--yes")
            assert said.code in (1, 6), said
            assert path.exists()
    assert "thesis.tex" in miles("rm", "own", "--yes").err


def test_logs_are_listed_and_shown_from_their_end(miles: Miles) -> None:
    logs = make_run("first", steps=3) / "logs" / "attempt_1"
    assert miles("logs", "first").code == 6
    (logs / "engine-0.log").write_bytes(b"\n".join(b"line %d" % n for n in range(500)) + b"\n\xff")
    (logs / "trainer-rank-0.log").write_text("")
    listed = miles("logs", "--json").result["logs"]
    assert sorted(one["log"] for one in listed) == ["engine-0", "trainer-rank-0"]
    shown = miles("logs", "first", "engine-0", "-n", "2").out
    assert shown == "line 499\n\ufffd\n"
    long = "x" * 30_000
    (logs / "engine-0.log").write_text(f"first\n{long}\nlast\n")
    assert miles("logs", "first", "engine-0", "-n", "2").out == f"{long}\nlast\n"
    assert "engine-0" in miles("logs", "first", "driver").err
    assert miles("logs", "first", "--attempt", "7").code == 6


def test_a_log_is_followed_until_its_run_ends(miles: Miles) -> None:
    run = make_run("first", steps=3)
    log = run / "logs" / "attempt_1" / "engine-0.log"
    log.write_text("old\n")
    command = [sys.executable, "-m", "milescli", "logs", "first", "engine-0", "--follow"]
    with (
        driver(run, ends_after=1) as process,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower,
    ):
        assert follower.stdout is not None and follower.stdout.readline() == "old\n"
        with open(log, "a") as opened:
            opened.write("new\nhal")
            opened.flush()
            assert follower.stdout.readline() == "new\n"
            opened.write("f\nno end of line")
        process.send_signal(signal.SIGTERM)
        assert follower.stdout.read() == "half\nno end of line\n"
        until(lambda: follower.poll() == 0, "the end of the follower")


def test_other_names_of_verbs_lead_to_them(miles: Miles) -> None:
    assert "fix: miles launch --recipe quickstart --steps 3" in (
        miles("train", "--recipe", "quickstart", "--steps", "3").err
    )
    assert "fix: miles runs" in miles("lst").err
    assert "fix: miles --help" in miles("foo").err


def test_a_page_shows_one_key_or_one_section_or_a_verb(miles: Miles) -> None:
    key = miles("help", "recipe", "train.optimizer.lr", "--json").result["keys"]
    assert [one["key"] for one in key] == ["train.optimizer.lr"]
    section = miles("help", "recipe", "train.optimizer", "--json").result["keys"]
    assert len(section) > 1 and all(one["key"].startswith("train.optimizer.") for one in section)
    assert miles("help", "recipe", "train.optimizer.rl").code == 3
    assert "--dry-run" in miles("help", "launch").out
    assert miles("help", "nosuch").code == 2


def test_the_last_of_two_values_counts(miles: Miles) -> None:
    said = miles(
        "launch", "quickstart", "--dry-run", "--json",
        "--set", "train.steps=5", "--set", "train.steps=6",
    )  # fmt: skip
    assert said.code == 0 and "train.steps=6" in said.err
    assert miles("launch", "quickstart", "--recipe", "quickstart-moe", "--dry-run").code == 2
    assert miles("launch").code == 2


def test_a_note_is_written_shown_listed_and_removed(miles: Miles) -> None:
    run = make_run("first", steps=3)
    assert "no note" in miles("note", "first").err
    said = miles("note", "first", "half the rate #sweep #keep/2", "--json")
    assert said.result["tags"] == ["sweep", "keep/2"]
    assert miles("note", "first").out == "half the rate #sweep #keep/2\n"
    assert "half the rate" in miles("runs").out
    refused = miles("note", "first", "x" * 3000)
    assert refused.code == 1 and "3000 characters" in refused.err
    assert miles("note", "first", "").code == 0 and not (run / "note.txt").exists()
    (run / "note.txt").symlink_to("/etc/hostname")
    assert "no note" in miles("note", "first").err
    assert miles("rm", "first", "--yes").code == 0 and not run.exists()
