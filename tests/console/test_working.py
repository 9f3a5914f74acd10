"""Work of unknown length: a line now and then in a log, a line that turns on a terminal."""

from __future__ import annotations

import io
import os
import pty
import sys

import pytest

from milescli.console import working as room
from milescli.console.output import Mode, Output
from milescli.console.working import working
from tests.waiting import until


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LINE_EVERY_S", 0.01)
    err = io.StringIO()
    with working(Output(stderr=err), lambda: "3 of 4 checks done; engine"):
        until(lambda: err.getvalue().count("\n") > 1, "two lines")
    assert all(
        line.endswith("s: 3 of 4 checks done; engine") for line in err.getvalue().splitlines()
    )


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.QUIET])
def test_programs_and_the_quiet_get_nothing(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LINE_EVERY_S", 0.0)
    out, err = io.StringIO(), io.StringIO()
    asked = list[int]()
    with working(Output(mode, stdout=out, stderr=err), lambda: asked.append(1) or ""):
        pass
    assert not asked and not out.getvalue() and not err.getvalue()


def test_a_terminal_shows_it_at_once_and_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        output = Output(stdout=sys.stdout, stderr=terminal)
        shown = ""
        with working(output, lambda: "engine " * 100):
            while "…" not in shown:
                shown += os.read(ours, 65536).decode()
        while "\x1b[?25h" not in shown:  # the cursor is back
            shown += os.read(ours, 65536).decode()
    os.close(ours)
    assert "engine engine" in shown and shown.count("\n") <= 1
