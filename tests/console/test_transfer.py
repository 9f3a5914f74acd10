"""Long work: lines in a log, events for programs, a bar on a terminal, nothing when quiet."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import termios

import pytest

from milescli.console import transfer
from milescli.console.output import Mode, Output
from milescli.console.transfer import Transfer


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(transfer, "time", clock)
    return clock


def _output(mode: Mode) -> tuple[Output, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Output(mode, stdout=out, stderr=err), out, err


def test_a_log_gets_a_line_now_and_then_with_speed_and_time_left(clock: _Clock) -> None:
    output, _, err = _output(Mode.HUMAN)
    with Transfer(output, label="converting", total=100 * 2**20, done=40 * 2**20) as moved:
        for _ in range(6):
            clock.now += 5
            moved(5 * 2**20)
    lines = err.getvalue().splitlines()
    assert lines[0] == "converting: 50.0 MiB of 100.0 MiB, 1.0 MiB/s, 50.0 s left"
    assert len(lines) == 3


def test_programs_get_events_and_the_last_one_at_the_end(clock: _Clock) -> None:
    output, out, _ = _output(Mode.JSON)
    with Transfer(output, label="converting", total=10) as moved:
        clock.now += 2
        moved(4)
        clock.now += 0.1
        moved(6)
    first, last = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["kind"], first["done_bytes"], first["bytes_per_s"], first["eta_s"]) == (
        "progress",
        4,
        2.0,
        3.0,
    )
    assert last["done_bytes"] == last["total_bytes"] == 10


def test_quiet_says_nothing(clock: _Clock) -> None:
    output, out, err = _output(Mode.QUIET)
    with Transfer(output, label="converting", total=10) as moved:
        clock.now += 60
        moved(10)
    assert out.getvalue() == err.getvalue() == ""


def test_what_is_counted_has_its_unit_rate_and_time_left(clock: _Clock) -> None:
    output, _, err = _output(Mode.HUMAN)
    with Transfer(output, label="asking heldout", total=200, unit="samples") as asked:
        clock.now += 20
        asked.reached(80)
        asked.reached(50)
    assert err.getvalue() == "asking heldout: 80 of 200 samples, 4.0/s, 30.0 s left\n"


def test_programs_are_told_the_unit_of_what_is_counted(clock: _Clock) -> None:
    output, out, _ = _output(Mode.JSON)
    with Transfer(output, label="comparing", total=10, unit="prompts") as looked:
        clock.now += 0.5
        looked(10)
    told = json.loads(out.getvalue())
    assert (told["unit"], told["done"], told["total"], told["eta_s"]) == ("prompts", 10, 10, 0.0)
    assert told["per_s"] == 20.0 and "done_bytes" not in told


def test_of_quick_work_programs_hear_only_where_they_should(clock: _Clock) -> None:
    output, out, _ = _output(Mode.JSON)
    with Transfer(output, label="looking", total=10, tells_quick=False) as looked:
        clock.now += 0.5
        looked(10)
    assert out.getvalue() == ""
    with Transfer(output, label="looking", total=10, tells_quick=False) as looked:
        looked(10)
        clock.now += 1.5
    assert json.loads(out.getvalue())["done"] == 10


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_on_any_width_the_figures_stay_and_nothing_is_longer_than_it_need_be(width: int) -> None:
    said = "52.0 MiB of 417.0 MiB, 7.5 MiB/s, 48.7 s left"
    line = transfer.bar_line("reading /data/big.jsonl", said, share=0.125, width=width).plain
    assert line.endswith(said) and len(line) <= max(width, len(said) + 1)
    assert ("━" in line) is (width >= 80)


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end() -> None:
    script = """
import sys, time
from milescli.console.output import Mode, Output
from milescli.console.transfer import Transfer
output = Output(Mode.QUIET if "--quiet" in sys.argv else Mode.HUMAN)
with Transfer(output, label="asking [heldout]", total=40, unit="samples") as asked:
    for _ in range(20):
        asked(1)
        time.sleep(0.03)
output.warn("end")
"""
    drawn = _on_a_terminal(script)
    assert "asking [heldout]" in drawn and " of 40 samples, " in drawn and " left" in drawn
    assert drawn.rstrip().endswith("end") and "\x1b[2K" in drawn
    assert "asking" not in _on_a_terminal(script, "--quiet")


def _on_a_terminal(script: str, *arguments: str) -> str:
    """What a process writes that has a terminal of 100 columns for its errors."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 100))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    os.close(theirs)
    drawn = b""
    try:
        while chunk := os.read(ours, 4096):
            drawn += chunk
    except OSError:
        pass  # how Linux says that nobody holds the other end any more
    os.close(ours)
    assert process.wait(timeout=200) == 0
    return drawn.decode()
