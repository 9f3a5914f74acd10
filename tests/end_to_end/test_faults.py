"""What dies is named, what is left is ended, and what was saved goes on. Real processes are killed
at work."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import (
    Workplace,
    listening_beyond_loopback,
    processes_of_run,
    saved,
    step_done,
    wait_until_gone,
)
from tests.shared_memory import forgotten

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
LONG = ("--set", "train.steps=500", "--set", "checkpoint.every=2")


def _find(processes, mark: str):
    return next(process for process in processes if mark in " ".join(process.cmdline()))


def _assert_clean(ours, shared_memory: set[str]) -> None:
    left = wait_until_gone(ours)
    assert not left, f"left behind: {left}"
    assert not forgotten(shared_memory)


def test_a_killed_engine_is_named_as_the_cause(
    workplace: Workplace, shared_memory: set[str]
) -> None:
    process = workplace.start("launch", "--recipe", "tiny.yaml", "--name", "faults", *LONG)
    workplace.wait_for("faults", saved(2), process)
    ours = processes_of_run(process.pid)
    assert listening_beyond_loopback(ours) == []
    _find(ours, "sglang::scheduler").send_signal(signal.SIGKILL)
    finished = workplace.finish(process, timeout_s=90)
    assert finished.code == 1, finished
    assert "engine 0" in finished.err and "Traceback (most recent call last)" not in finished.err
    assert re.search(r"or: miles resume runs/faults   # goes on from step \d+\n", finished.err), (
        finished
    )
    assert (
        json.loads((workplace.run("faults") / "logs" / "latest" / "verdict.json").read_text())[
            "outcome"
        ]
        == "failed"
    )
    _assert_clean(ours, shared_memory)


def test_after_it_a_killed_trainer_rank_is_named_as_the_cause(
    workplace: Workplace, shared_memory: set[str]
) -> None:
    """Goes on with the run of the test before: resuming is part of what is tested."""
    before = workplace.events("faults")
    reached = max(event["step"] for event in before if event["event"] == "CheckpointSaved")
    process = workplace.start("resume", "faults")
    workplace.wait_for("faults", step_done(reached + 1), process, after=len(before))
    ours = processes_of_run(process.pid)
    rank = (workplace.run("faults") / "logs" / "latest" / "trainer-rank-0.log").resolve()
    victim = next(
        each for each in ours if any(Path(file.path) == rank for file in each.open_files())
    )
    victim.send_signal(signal.SIGKILL)
    finished = workplace.finish(process, timeout_s=90)
    assert finished.code == 1, finished
    assert "trainer rank 0 died" in finished.err
    _assert_clean(ours, shared_memory)


def _terminate(driver: int) -> None:
    """As a job scheduler does: the driver alone."""
    os.kill(driver, signal.SIGTERM)


def _press_ctrl_c(driver: int) -> None:
    """As a terminal does: the whole foreground process group, Ray's processes too."""
    os.killpg(driver, signal.SIGINT)


@pytest.mark.parametrize("stop", [_terminate, _press_ctrl_c])
def test_a_signal_saves_and_says_how_to_go_on(
    workplace: Workplace, shared_memory: set[str], stop
) -> None:
    before = workplace.events("faults")
    reached = max(event["step"] for event in before if event["event"] == "CheckpointSaved")
    process = workplace.start("resume", "faults")
    workplace.wait_for("faults", step_done(reached + 1), process, after=len(before))
    ours = processes_of_run(process.pid)
    stop(process.pid)
    finished = workplace.finish(process, timeout_s=90)
    assert finished.code == 75, finished
    assert "miles resume" in finished.err
    newest = max(
        event["step"] for event in workplace.events("faults") if event["event"] == "CheckpointSaved"
    )
    assert newest >= reached + 1
    _assert_clean(ours, shared_memory)
