"""Bytes as they are moved: lines in a log, events for programs, a bar on a terminal."""

from __future__ import annotations

import io
import json

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
    with Transfer(
        output, label="converting", total_bytes=100 * 2**20, done_bytes=40 * 2**20
    ) as moved:
        for _ in range(6):
            clock.now += 5
            moved(5 * 2**20)
    lines = err.getvalue().splitlines()
    assert lines[0] == "converting: 50.0 MiB of 100.0 MiB, 1.0 MiB/s, 50.0 s left"
    assert len(lines) == 3


def test_programs_get_events_and_the_last_one_at_the_end(clock: _Clock) -> None:
    output, out, _ = _output(Mode.JSON)
    with Transfer(output, label="converting", total_bytes=10) as moved:
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
    with Transfer(output, label="converting", total_bytes=10) as moved:
        clock.now += 60
        moved(10)
    assert out.getvalue() == err.getvalue() == ""
