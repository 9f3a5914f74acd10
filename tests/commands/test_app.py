"""The single door: what is printed, and with which code the program ends."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from milescli import __version__
from milescli.commands.app import write_crash_report
from milescli.console.standard_streams import until_closed
from milescli.core.errors import ExitCode, FitError, Stopped
from tests.commands.conftest import Miles, Replace

VERBS = (
    *("launch", "simulate", "resume", "evaluate", "export", "doctor", "recipes"),
    *(
        "runs",
        "status",
        "stop",
        "logs",
        "note",
        "rm",
        "ui",
        "mcp",
        "report",
        "compare",
        "chat",
        "serve",
        "why",
        "profile",
    ),
    "help",
)


def fails_with(error: BaseException):  # type: ignore[no-untyped-def]
    def launch(loaded, *, output):  # type: ignore[no-untyped-def]
        raise error

    return launch


def test_bare_miles_shows_the_first_page(miles: Miles) -> None:
    said = miles()
    assert said.code == 0 and "miles launch quickstart" in said.out and said.err == ""


def test_version(miles: Miles) -> None:
    assert miles("--version").out == f"miles {__version__}\n"
    assert json.loads(miles("--version", "--json").out) == {
        "schema": 1,
        "kind": "version",
        "version": __version__,
    }


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["lanch"], "launch"),
        (["launch"], "name a recipe"),
        (["launch", "--recipe", "quickstart", "--gpus", "many"], "--gpus"),
        (["launch", "--recipe", "quickstart", "--steps", "0"], "--steps"),
        (["launch", "--recipe", "quickstart", "--stps", "3"], "--steps"),
        (["resume"], "RUN"),
        (["export", "x"], "--to"),
        (["export", "x", "--to", "y", "--dtype", "fp8"], "fp8"),
        (["help", "everything"], "everything"),
        (["recipes", "show"], "show quickstart"),
    ],
)
def test_a_command_line_that_is_not_understood_ends_with_2(
    miles: Miles, argv: list[str], what: str
) -> None:
    said = miles(*argv)
    assert said.code == 2 and said.out == ""
    assert said.err.startswith("error: ") and what in said.err and "fix: miles" in said.err


def test_the_fix_of_a_usage_error_names_the_verb(miles: Miles) -> None:
    assert "fix: miles launch --help" in miles("launch").err


def test_with_json_even_a_usage_error_is_one_object(miles: Miles) -> None:
    said = miles("launch", "--json")
    assert said.code == 2 and json.loads(said.err)["exit_code"] == 2


@pytest.mark.parametrize("place", [["--json", "recipes"], ["recipes", "--json"]])
def test_json_may_stand_before_and_after_the_verb(miles: Miles, place: list[str]) -> None:
    assert json.loads(miles(*place).out)["kind"] == "recipes"


@pytest.mark.parametrize(
    ("error", "code"),
    [(FitError("a", why="b", fix="c"), 5), (Stopped("a", why="b", fix="miles resume x"), 75)],
)
def test_an_explained_error_ends_with_its_own_code(
    miles: Miles, replace: Replace, error: Exception, code: int
) -> None:
    replace("milescli.runtime.launch", launch=fails_with(error))
    said = miles("launch", "--recipe", "quickstart")
    assert said.code == code and "error: a" in said.err and "  why: b" in said.err


def test_a_fault_of_ours_leaves_its_traceback_in_a_file(
    miles: Miles, replace: Replace, tmp_path: Path
) -> None:
    replace("milescli.runtime.launch", launch=fails_with(ZeroDivisionError("by zero")))
    said = miles("launch", "--recipe", "quickstart", "--set", "train.steps=3")
    assert said.code == 70 and "Traceback" not in said.err
    (file,) = (tmp_path / "state" / "miles").glob("crash-*.txt")
    assert str(file) in said.err
    text = file.read_text()
    assert "ZeroDivisionError: by zero" in text and "--set train.steps=3" in text


def test_a_full_disk_that_a_rust_library_tells_of_is_none_either(
    miles: Miles, replace: Replace
) -> None:
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    replace("milescli.runtime.launch", launch=fails_with(full))
    said = miles("launch", "--recipe", "quickstart")
    assert said.code == 4 and "no space is left on the disk" in said.err


def test_a_full_disk_is_no_fault_of_ours(miles: Miles, replace: Replace, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "runs/a/data.jsonl")
    replace("milescli.runtime.launch", launch=fails_with(full))
    said = miles("launch", "--recipe", "quickstart")
    assert said.code == 4 and "no space is left on the disk" in said.err
    assert "runs/a/data.jsonl" in said.err and not list((tmp_path / "state").rglob("crash-*"))


def test_where_the_home_is_read_only_the_traceback_goes_elsewhere(
    miles: Miles, replace: Replace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a-file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    replace("milescli.runtime.launch", launch=fails_with(ZeroDivisionError()))
    assert miles("launch", "--recipe", "quickstart").code == 70
    assert len(list(tmp_path.glob("miles-crash-*.txt"))) == 1


def test_a_working_folder_that_was_deleted_is_named(
    miles: Miles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    said = miles("runs")
    assert said.code == 4 and "the working folder does not exist" in said.err
    assert "fix: cd " in said.err


def test_a_fault_in_a_deleted_folder_leaves_its_traceback_too(
    miles: Miles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", unknown_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    file = write_crash_report(ZeroDivisionError(), argv=["runs"])
    assert "ZeroDivisionError" in file.read_text() and file.parent == tmp_path


@pytest.mark.parametrize(
    "argv",
    [
        ["status", "~nobodyhere/x"],
        ["launch", "--recipe", "~nobodyhere/r.yaml", "--dry-run"],
        ["launch", "--recipe", "quickstart", "--dry-run", "--set", "data.prompts=~nobodyhere/x"],
        ["export", "~nobodyhere/x", "--to", "y"],
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_the_home_of_nobody_is_an_error_of_the_command_line(miles: Miles, argv: list[str]) -> None:
    said = miles(*argv)
    assert said.code == 2 and "~nobodyhere/" in said.err and "user who does not exist" in said.err


def test_ctrl_c_ends_with_130(miles: Miles, replace: Replace) -> None:
    replace("milescli.runtime.launch", launch=fails_with(KeyboardInterrupt()))
    said = miles("launch", "--recipe", "quickstart")
    assert said.code == 130 and "Traceback" not in said.err


def test_a_reader_that_goes_away_is_no_fault() -> None:
    command = f"{sys.executable} -m milescli help recipe | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200)
    assert done.stdout.startswith("A recipe is YAML") and done.stderr == ""
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], timeout=200)
    assert done.returncode == ExitCode.DONE


@pytest.mark.parametrize(
    ("command", "code"), [("launch --recipe quickstart --dry-run", 0), ("help recipe", 4)]
)
def test_a_full_disk_under_the_output_fails_what_is_printed_and_no_run(
    command: str, code: int
) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m milescli {command} > /dev/full"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_printed_to_a_terminal_that_was_closed_fails_nothing() -> None:
    terminal, own = pty.openpty()
    with os.fdopen(os.dup(own), "w") as plain, until_closed(plain, own) as stream:
        print("seen", file=stream, flush=True)
        assert os.read(terminal, 100).startswith(b"seen")
        os.close(terminal)
        with pytest.raises(OSError, match="Input/output"):
            os.write(own, b"lost")
        print("lost", file=stream, flush=True)
    os.close(own)


def test_a_reader_that_reads_no_more_stops_nothing_and_is_told_what_it_missed() -> None:
    reading, writing = os.pipe()
    with os.fdopen(os.dup(writing), "w") as plain:
        stream = until_closed(plain, writing, patience_s=0.01)
        for _ in range(4):
            print("x" * 40_000, file=stream, flush=True)
        seen = len(os.read(reading, 1_000_000))
        print("back", file=stream, flush=True)
        after = os.read(reading, 1_000_000).decode()
    assert after == f"\n[{4 * 40_001 - seen} bytes were not shown: nobody read them]\nback\n"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("closed", "told"), [(">&-", "standard output is closed"), (">&- 2>&-", ""), ("2>&-", "")]
)
def test_a_standard_stream_that_is_closed_is_missed_and_no_file_takes_its_place(
    closed: str, told: str
) -> None:
    script = f"{sys.executable} -m milescli help nothing {closed}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr and bool(told) == bool(done.stderr)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_a_short_file(verb: str) -> None:
    import milescli.commands

    file = Path(milescli.commands.__file__).parent / f"{verb}.py"
    assert len(file.read_text().splitlines()) < 90


@pytest.mark.parametrize(
    "verb",
    ["launch", "resume", "eval", "export", "doctor", "recipes", "runs", "why", "profile", "help"],
)
def test_the_help_of_a_verb_has_examples(miles: Miles, verb: str) -> None:
    said = miles(verb, "--help")
    assert (
        said.code == 0
        and "Examples:" in said.out
        and f"miles {verb}" in said.out
        and "--json" in said.out
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["status", "LONG"],
        ["export", "LONG", "--to", "out"],
        ["data", "check", "LONG"],
        ["launch", "--recipe", "quickstart", "--dry-run", "--set", "data.prompts=LONG"],
        ["recipes", "show", "LONG"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_path_that_no_file_can_have_is_an_error_of_its_own(miles: Miles, argv: list[str]) -> None:
    said = miles(*(word.replace("LONG", 5000 * "9") for word in argv), "--json")
    error = json.loads(said.err.splitlines()[-1])
    assert said.code == ExitCode.FAILED and error["why"] == os.strerror(errno.ENAMETOOLONG)
    assert len(error["error"]) < 300
