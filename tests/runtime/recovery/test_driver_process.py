"""The parent of a driver: it speaks where that dies without a word, passes signals on once, and
starts a driver again as often as it may. Real processes, and no engine."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from milescli.runtime.recovery.driver_process import pause_s
from tests.end_to_end.runs import ROOT
from tests.waiting import assert_gone

PROGRAM = textwrap.dedent(
    """
    import os, signal, sys, time
    from pathlib import Path
    from milescli.console.output import Mode, Output
    from milescli.core.driver_pipe import report_to_parent
    from milescli.core.errors import (
        MilesError, NodeDied, NodesJoined, RecipeError, WaitTimeout, WorkerDied
    )
    from milescli.runtime.recovery import driver_process

    run, kind, num_deaths = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    driver_process.PAUSE_S = 0.0

    def attempt(path):
        if kind == "connects":
            from milescli.backends.ray.joining import deferring_signals

            report_to_parent(run=path)
            with deferring_signals():
                print("up", os.getpid(), flush=True)
                while True:
                    time.sleep(0.02)
        log_dir = path / "logs" / f"attempt_{len(list(path.glob('logs/*'))) + 1}"
        log_dir.mkdir(parents=True)
        report_to_parent(run=path, log_dir=log_dir, max_restarts=2, window_s=60.0, num_steps=9)
        number = int(log_dir.name.partition("_")[2])
        if num_deaths and number > num_deaths:
            report_to_parent(code=0)
            return
        with (path / "events.jsonl").open("a") as events:
            events.write('{"event": "StepDone", "step": %d, "num_steps": 9}\\n' % number)
        if kind == "saved":
            with (path / "events.jsonl").open("a") as events:
                events.write('{"event": "CheckpointSaved", "step": 9}\\n')
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "killed":
            (log_dir / "verdict.json").write_text('{"outcome": "killed"}')
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exits":
            (log_dir / "verdict.json").write_text('{"outcome": "killed"}')
            os._exit(0)
        if kind == "starts-ray":
            from milescli.backends.ray.joining import stderr_in_log

            with stderr_in_log() as log:
                os.write(2, b"core_worker.cc:9: Check failed\\n")
                print(log.path, flush=True)
                os.abort()
        if kind == "saw":
            (log_dir / "verdict.json").write_text('{"outcome": "killed"}')
            cause = WorkerDied("the raylet died", why="SIGKILL", fix="look")
            report_to_parent(cause=cause.as_dict())
            os._exit(1)
        if kind in ("died", "wrong", "lost-alone", "joined"):
            kinds = {
                "died": WorkerDied,
                "wrong": RecipeError,
                "lost-alone": NodeDied,
                "joined": NodesJoined,
            }
            error = kinds[kind]("it", why="x", fix="y")
            print("told", file=sys.stderr)
            report_to_parent(error=error.as_dict(), code=int(error.exit_code))
            sys.exit(error.exit_code)
        if kind == "counts":
            came = []
            signal.signal(signal.SIGINT, lambda *_: came.append(1))
            print("up", os.getpid(), flush=True)
            while not came:
                time.sleep(0.02)
            time.sleep(0.3)
            report_to_parent(code=100 + len(came))
            os._exit(100 + len(came))
        if kind == "closed":
            came = []
            signal.signal(signal.SIGHUP, lambda *_: came.append(1))
            print("up", os.getpid(), flush=True)
            while not came:
                time.sleep(0.02)
            report_to_parent(code=101)
            os._exit(101)

    output = Output(Mode.JSON)
    unasked = kind in ("lost-alone", "joined")
    restartable = num_deaths and not unasked
    restart_on = driver_process.RESTARTABLE if restartable else driver_process.NODE_ERRORS
    of_run = driver_process.Parent(
        output=output,
        start_command="miles launch again",
        resume=attempt,
        restart_on=restart_on,
    )
    try:
        code = of_run.drive(lambda: attempt(run))
    except MilesError as error:
        output.error(error)
        code = error.exit_code
    sys.exit(code)
    """
)


@dataclass(frozen=True, kw_only=True)
class Said:
    """How the parent ended, and the objects that it printed on stderr."""

    code: int
    lines: list[dict]
    out: str = field(default="", compare=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("")
    return folder


def _command(run: Path, kind: str, num_deaths: int = 0) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(run), kind, str(num_deaths)]


def _drive(run: Path, kind: str, num_deaths: int = 0) -> Said:
    ended = subprocess.run(
        _command(run, kind, num_deaths), cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    lines = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    return Said(code=ended.returncode, lines=lines, out=ended.stdout)


@pytest.mark.parametrize(
    ("kind", "what", "why"),
    [
        ("killed", "the driver of run one died", "ended by SIGKILL"),
        ("exits", "the driver of run one died", "exited with code 0 without a message"),
        ("saw", "the raylet died", "SIGKILL"),
    ],
)
def test_a_driver_that_dies_without_a_word_is_named_and_its_verdict_is_written(
    run: Path, kind: str, what: str, why: str
) -> None:
    said = _drive(run, kind)
    assert said.code == 1
    [error] = said.lines
    assert error["error"] == what and why in error["why"]
    assert error["fix"][0].startswith(f"miles resume {run}")
    verdict = json.loads((run / "logs" / "attempt_1" / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["step"]) == ("killed", 1)
    assert verdict["error"]["error"] == what
    last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["outcome"]) == ("RunEnded", "killed")
    assert what in (run / "logs" / "attempt_1" / "why.txt").read_text()


def test_what_ray_printed_before_it_aborted_is_quoted_once(run: Path) -> None:
    said = _drive(run, "starts-ray")
    [error] = said.lines
    assert "SIGABRT" in error["why"] and error["why"].count("core_worker.cc:9") == 1
    assert not Path(said.out.strip()).exists()


@pytest.mark.parametrize(("kind", "code"), [("died", 1), ("wrong", 3)])
def test_what_a_driver_has_told_is_not_told_again(run: Path, kind: str, code: int) -> None:
    assert _drive(run, kind) == Said(code=code, lines=[])


def test_a_supervised_driver_is_started_again_until_it_is_done(run: Path) -> None:
    said = _drive(run, "killed", 2)
    assert said.code == 0
    assert [line["kind"] for line in said.lines] == ["error", "warning", "error", "warning"]
    assert "attempt 3, restart 2 of at most 2" in said.lines[-1]["text"]


def test_after_the_loss_of_a_node_a_run_goes_on_unasked(run: Path) -> None:
    assert _drive(run, "lost-alone", num_deaths=1).code == 0
    assert len(list((run / "logs").iterdir())) == 2


def test_when_nodes_have_joined_a_run_begins_again_at_once_and_as_often(run: Path) -> None:
    said = _drive(run, "joined", num_deaths=5)
    assert said.code == 0 and len(list((run / "logs").iterdir())) == 6
    assert "one restarts: attempt 6" in said.lines[-1]["text"]
    assert {line["kind"] for line in said.lines} == {"note"}


def test_a_run_whose_steps_are_all_saved_is_not_started_again(run: Path) -> None:
    said = _drive(run, "saved", num_deaths=9)
    assert said.code == 1 and len(list((run / "logs").iterdir())) == 1
    [error] = said.lines
    assert error["fix"][0].startswith(f"miles export {run} --to DIR")


def test_restarts_are_bounded(run: Path) -> None:
    said = _drive(run, "killed", 9)
    assert said.code == 1 and "fault.max_restarts is 2" in said.lines[-1]["why"]
    assert len(list(run.glob("logs/*"))) == 3


def test_pauses_double_up_to_the_longest_however_many_restarts_there_were() -> None:
    pauses = [pause_s(restart) for restart in (1, 2, 3, 7, 8, 5000)]
    assert pauses == [5.0, 10.0, 20.0, 300.0, 300.0, 300.0]


def test_an_error_of_the_users_making_is_not_tried_again(run: Path) -> None:
    assert _drive(run, "wrong", 9) == Said(code=3, lines=[])
    assert len(list(run.glob("logs/*"))) == 1


@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_reaches_the_driver_once(run: Path, to_group: bool) -> None:
    process = subprocess.Popen(
        _command(run, "counts"), cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert process.stdout is not None and process.stdout.readline().startswith("up")
    (os.killpg if to_group else os.kill)(process.pid, signal.SIGINT)
    assert process.wait(120) == 101
    process.stdout.close()


@pytest.mark.parametrize("of_terminal", [True, False])
def test_ctrl_c_of_a_terminal_reaches_the_driver_once(run: Path, of_terminal: bool) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, _command(run, "counts"))
    said = b""
    while b"up" not in said:
        said += os.read(terminal, 1024)
    if of_terminal:
        os.write(terminal, b"\x03")
    else:
        os.kill(pid, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 101
    os.close(terminal)


def test_a_driver_that_connects_to_ray_without_end_can_be_stopped(run: Path) -> None:
    process = subprocess.Popen(
        _command(run, "connects"), cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline().startswith(b"up")
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(120) == 130
    process.stdout.close()
    (verdict,) = run.glob("logs/attempt_*/verdict.json")
    assert json.loads(verdict.read_text())["outcome"] == "stopped"


def test_a_driver_hears_that_its_terminal_is_closed(run: Path) -> None:
    """The kernel tells the leader of the session alone, which is the parent here."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, _command(run, "closed"))
    said = b""
    while b"\n" not in said.partition(b"up")[2]:  # a terminal shows the line in pieces
        said += os.read(terminal, 1024)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 101


def test_a_driver_that_is_held_is_told_of_and_hears_who_wants_its_end(run: Path) -> None:
    process = subprocess.Popen(
        _command(run, "counts"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    driver = int(process.stdout.readline().split()[1])
    os.kill(driver, signal.SIGSTOP)
    told = json.loads(process.stderr.readline())
    assert told["kind"] == "warning" and f"`kill -CONT {driver}`" in told["text"]
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 101
    process.stdout.close()
    process.stderr.close()


def test_whoever_kills_the_parent_kills_the_driver(run: Path) -> None:
    process = subprocess.Popen(_command(run, "counts"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    driver = psutil.Process(int(process.stdout.readline().split()[1]))
    process.kill()
    process.wait(120)
    process.stdout.close()
    assert_gone(driver.pid)
