"""A check that hangs, dies or says what nobody expects: each announced line is said all the same,
and nothing is left of it. In a copy of the visit with checks of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.bench.gpu.conftest import BENCH

CHECKS = """
CHECKS = tuple(
    Check(phase="planted", subject=name, function=name, lines=("first", "second"), limit_s=limit)
    for name, limit in (("good", 60), ("dies", 60), ("hangs", 4), ("lies", 60))
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

def lies(visit, subject):
    yield Line(name="third", measured=1.0, unit="s")
    yield Line(name="first", measured=1.0, unit="s")
"""


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    """All planted checks, one after the other."""
    folder = tmp_path_factory.mktemp("visit")
    copied = shutil.copytree(
        BENCH,
        folder / "gpu",
        ignore=lambda _, names: {"site", "parts", "out", "results"} & {*names},
    )
    with (copied / "checks/__init__.py").open("a") as table:
        table.write(CHECKS)
    (copied / "checks/planted.py").write_text(PLANTED)
    environment = os.environ | {
        "PLANTED_PID": str(folder / "pid"),
        "PYTHONPATH": str(BENCH.parents[1]),
    }
    command = [sys.executable, str(copied / "visit.py"), "all", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--out", str(folder / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return folder, done


def records(folder: Path) -> dict[str, dict]:
    lines = (folder / "out/lines.jsonl").read_text().splitlines()
    parsed = [json.loads(line) for line in lines]
    assert ["visit" in line for line in parsed].count(True) == 1
    return {f"{line['check']}.{line['name']}": line for line in parsed[1:]}


def test_every_announced_line_is_said_with_its_verdict(visited) -> None:
    folder, done = visited
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
    }
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == len(verdicts)


def test_the_reason_is_in_the_line(visited) -> None:
    lines = records(visited[0])
    assert lines["planted.dies.second"]["note"] == "the device is gone"
    assert lines["planted.hangs.second"]["note"].startswith("after 4 s")
    assert "does not announce `third`" in lines["planted.lies.first"]["note"]


def test_nothing_of_a_check_that_hangs_is_left(visited) -> None:
    pid = int((visited[0] / "pid").read_text())
    until = time.monotonic() + 30
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)


def test_a_phase_that_does_not_exist_is_refused_with_those_that_do() -> None:
    command = [sys.executable, str(BENCH / "visit.py"), "ceilngs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "`ceilngs` is no phase" in done.stderr and "ceilings" in done.stderr
