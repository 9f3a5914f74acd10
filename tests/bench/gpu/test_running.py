"""A check that hangs, dies or says what nobody expects: each announced line is said all the same,
and nothing is left of it. In a copy of the visit with checks of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.gpu.conftest import BENCH
from tests.waiting import assert_gone, until

CHECKS = """
CHECKS = tuple(
    Check(phase="planted", subject=name, function=name, lines=("first", "second"), limit_s=limit)
    for name, limit in (
        ("good", 60), ("dies", 60), ("hangs", 3), ("lies", 60), ("ends_badly", 60), ("waits", 200),
    )
)
PHASES = ("planted",)
"""
PLANTED = """
import os, subprocess, sys, time
from pathlib import Path
from lines import Bound, Line

def good(visit, subject):
    yield Line(name="first", measured=1.0, unit="s")
    yield Line(name="second", measured=2.0, unit="s", bound=Bound(kind="at most", value=2))

def dies(visit, subject):
    yield Line(name="first", measured=1.0, unit="s")
    raise SystemExit("the device is gone")

def hangs(visit, subject):
    yield Line(name="first", measured=1.0, unit="s")
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path(os.environ["PLANTED_PID"]).write_text(str(child.pid))
    while True:
        try:
            time.sleep(300)
        except SystemExit:
            pass

def ends_badly(visit, subject):
    yield from good(visit, subject)
    raise SystemExit("it could not clean up")

def waits(visit, subject):
    try:
        Path(os.environ["PLANTED_PID"]).write_text(str(os.getpid()))
        time.sleep(300)
    finally:
        Path(os.environ["PLANTED_PID"]).unlink()
    yield Line(name="first", measured=1.0, unit="s")

def lies(visit, subject):
    yield Line(name="third", measured=1.0, unit="s")
    yield Line(name="first", measured=1.0, unit="s")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a copy of the visit that has the planted checks."""
    folder = tmp_path_factory.mktemp("visit")
    made = shutil.ignore_patterns("site", "parts", "out", "results")
    copied = shutil.copytree(BENCH, folder / "gpu", ignore=made)
    with (copied / "checks/__init__.py").open("a") as table:
        table.write(CHECKS)
    (copied / "checks/planted.py").write_text(PLANTED)
    return folder


def start(folder: Path, *checks: str, out: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PLANTED_PID": str(folder / f"{out}.pid"),
        "PYTHONPATH": str(BENCH.parents[1]),
    }
    command = [sys.executable, str(folder / "gpu/visit.py"), *checks, "--device", "cpu"]
    return subprocess.Popen(
        [*command, "--out", str(folder / out)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def visited(folder: Path) -> tuple[Path, int, str]:
    """All but one, one after the other: where, exit code and output."""
    names = [f"planted.{name}" for name in ("good", "dies", "hangs", "lies", "ends_badly")]
    process = start(folder, *names, out="out")
    shown, _ = process.communicate(timeout=600)
    return folder, process.returncode, shown


def records(folder: Path) -> dict[str, dict]:
    lines = (folder / "out/lines.jsonl").read_text().splitlines()
    parsed = [json.loads(line) for line in lines]
    assert ["visit" in line for line in parsed].count(True) == 1
    return {f"{line['check']}.{line['name']}": line for line in parsed[1:]}


def test_every_announced_line_is_said_with_its_verdict(visited) -> None:
    folder, code, shown = visited
    verdicts = {name: line["verdict"] for name, line in records(folder).items()}
    assert verdicts == {
        "planted.good.first": "measured",
        "planted.good.second": "ok",
        "planted.dies.first": "measured",
        "planted.dies.second": "failed",
        "planted.hangs.first": "measured",
        "planted.hangs.second": "timeout",
        "planted.lies.first": "failed",
        "planted.lies.second": "failed",
        "planted.ends_badly.first": "measured",
        "planted.ends_badly.second": "ok",
        "planted.ends_badly.its end": "failed",
    }
    assert code == 1
    assert len(shown.splitlines()) == len(verdicts)


def test_the_reason_is_in_the_line(visited) -> None:
    lines = records(visited[0])
    assert lines["planted.dies.second"]["note"] == "the device is gone"
    assert lines["planted.hangs.second"]["note"].startswith("after 12 s"), "a CPU has more time"
    assert "does not announce `third`" in lines["planted.lies.first"]["note"]
    note = lines["planted.ends_badly.its end"]["note"]
    assert note == "exit code 1; it could not clean up"


def test_nothing_of_a_check_that_hangs_is_left(visited) -> None:
    assert_gone(int((visited[0] / "out.pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_visit_that_is_ended_takes_its_check_along(folder: Path, number: int) -> None:
    out = signal.Signals(number).name
    process, file = start(folder, "planted.waits", out=out), folder / f"{out}.pid"
    pid = int(until(lambda: file.exists() and file.read_text()))
    process.send_signal(number)
    process.communicate(timeout=200)
    assert_gone(pid)
    assert not file.exists(), "it was not let clean up"


def test_a_phase_that_does_not_exist_is_refused_with_those_that_do() -> None:
    command = [sys.executable, str(BENCH / "visit.py"), "ceilngs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "`ceilngs` is no phase" in done.stderr and "ceilings" in done.stderr
