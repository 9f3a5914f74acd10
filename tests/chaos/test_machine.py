"""What harms of the machine need, and that a clock is moved for the run's processes alone."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos import machine
from tests.chaos.faults import FAULTS
from tests.chaos.machine import HARMS, Scene, why_impossible
from tests.chaos.place import Place


def test_every_harm_has_a_row_and_a_row_that_needs_what_is_not_here_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(HARMS) <= {fault.harm for fault in FAULTS}
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    [clock] = [fault for fault in FAULTS if fault.name == "clock-back"]
    [cut] = [fault for fault in FAULTS if fault.name == "network-cut"]
    [kill] = [fault for fault in FAULTS if fault.name == "rank-kill"]
    assert why_impossible(clock) == "gcc is not installed"
    assert "not installed" in (why_impossible(cut) or "")
    assert why_impossible(kill) is None


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_a_clock_steps_for_the_processes_of_the_run_and_no_wait_is_longer(tmp_path: Path) -> None:
    place = Place(tmp_path)
    program = (
        "import threading, time, datetime\n"
        "input()\n"
        "print(time.time(), datetime.datetime.now().timestamp())\n"
        "began = time.monotonic(); threading.Event().wait(0.1); print(time.monotonic() - began)\n"
    )
    with HARMS["clock-forward"].around(place, "run"):
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=place.variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        scene = Scene(attempt=None, place=place, victims=[], chance=random.Random(1))  # type: ignore[arg-type]
        told = HARMS["clock-forward"].do(scene)
        out, _ = process.communicate("\n", timeout=200)
    first, second, waited = map(float, out.split())
    jumped = int(told.split()[0])
    assert first - time.time() == pytest.approx(jumped, abs=30)
    assert second == pytest.approx(first, abs=1)
    assert 0.1 <= waited < 20
    assert place.variables == {}


def test_a_file_fills_a_disk_to_its_last_byte(tmp_path: Path) -> None:
    place, run = Place(tmp_path), "small"
    if reason := HARMS["fill"].why_not():
        pytest.skip(reason)
    try:
        around = HARMS["fill"].around(place, run)
        around.__enter__()
    except subprocess.CalledProcessError:
        pytest.skip("the file system can be mounted here")
    try:
        machine.fill_up(place.run(run) / "ballast")
        assert shutil.disk_usage(place.run(run)).free == 0
        HARMS["fill"].undo(place, run)
        assert shutil.disk_usage(place.run(run)).free > 2**20
    finally:
        around.__exit__(None, None, None)
