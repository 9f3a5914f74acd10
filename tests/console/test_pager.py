"""A page that is longer than the screen goes through the pager; nothing else does."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = """
import sys
from milescli.console.output import Mode, Output
from milescli.console.pager import paging
output = Output(Mode(sys.argv[2]))
with paging(output):
    output.table(["number"], [(f"row {n}",) for n in range(int(sys.argv[1]))])
    print("a word of a library")
    if len(sys.argv) > 3:
        raise SystemExit(sys.argv[3])
"""
_OURS = ("PAGER", "NO_PAGER", "LINES", "COLUMNS", "NO_COLOR")
PAGER = "sh -c 'sed s/row/PAGED/'"


def on_terminal(*argv: str, size: tuple[int, int] = (20, 80), **environ: str) -> str:
    """What a terminal of (lines, columns) shows of a program."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, size)
    kept = {name: text for name, text in os.environ.items() if name not in _OURS}
    program = subprocess.Popen(
        argv,
        cwd=ROOT,
        env={**kept, "TERM": "xterm", **environ},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the last of its processes has ended
            break
    program.wait()
    os.close(ours)
    return shown.decode()


def page(rows: int, *more: str, mode: str = "human", **environ: str) -> str:
    return on_terminal(sys.executable, "-c", PAGE, str(rows), mode, *more, **environ)


def test_a_page_that_is_longer_than_the_screen_goes_through_the_pager() -> None:
    shown = page(30, PAGER=PAGER)
    assert shown.count("PAGED ") == 30 and "a word of a library" in shown
    assert "\x1b[" in shown, "with its colours"


@pytest.mark.parametrize(
    ("rows", "mode", "environ"),
    [
        (5, "human", {"PAGER": PAGER}),
        (30, "quiet", {"PAGER": PAGER}),
        (30, "human", {"PAGER": PAGER, "NO_PAGER": "1"}),
        (30, "human", {"PAGER": PAGER, "TERM": "dumb"}),
        (30, "human", {"PAGER": "cat"}),
        (30, "human", {"PAGER": ""}),
        (30, "human", {"PAGER": "no-such-pager"}),
    ],
)
def test_what_fits_or_is_not_to_be_paged_is_printed(
    rows: int, mode: str, environ: dict[str, str]
) -> None:
    shown = page(rows, mode=mode, **environ)
    assert shown.count("row ") == rows and "PAGED" not in shown


def test_a_page_that_breaks_off_is_printed() -> None:
    shown = page(30, "it broke", PAGER=PAGER)
    assert shown.count("row ") == 30 and shown.rstrip().endswith("it broke")


def test_a_pipe_has_no_pager() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PAGE, "30", "human"],
        cwd=ROOT,
        env={**os.environ, "PAGER": PAGER},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.count("row ") == 30 and "PAGED" not in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        "help recipe train",
        "help launch",
        "recipes",
        "algorithms",
        "launch quickstart --on 8xH200 --dry-run -v",
    ],
)
def test_long_pages_of_verbs_have_a_pager(words: str) -> None:
    shown = on_terminal(
        sys.executable, "-m", "milescli", *words.split(), PAGER="sh -c 'echo PAGER; cat'"
    )
    assert shown.count("PAGER") == 1, shown
