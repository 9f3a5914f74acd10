"""Processes that collect change no number of a run: not of one that was killed and resumed, nor of
one that lost such a process. Real processes are killed at work."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos.oracle import OF_ENGINES
from tests.end_to_end.runs import (
    Finished,
    Workplace,
    actor_of,
    learned,
    processes_of_run,
    saved,
    step_done,
    wait_until_gone,
)
from tests.shared_memory import forgotten

NAME = "collected"
COLLECTORS = ("--set", "machine.collectors=2")


def _learned(workplace: Workplace, name: str) -> dict[int, tuple[dict, dict]]:
    """Of each step as it was done last, without the last bits of the engines' log-probs, which
    depend on what an engine computes together, and choose no token."""
    told = {step["step"]: learned(step) for step in workplace.steps(name)}
    return {
        step: ({key: value for key, value in report.items() if key not in OF_ENGINES}, rollout)
        for step, (report, rollout) in told.items()
    }


@pytest.fixture(scope="module")
def collected(workplace: Workplace, shared_memory: set[str]) -> Finished:
    """The six steps of `whole` by two processes: the driver is killed after step 3 was saved, and
    one of the processes in the run that is resumed."""
    launched = workplace.start("launch", "--recipe", "tiny.yaml", *COLLECTORS, "--name", NAME)
    for happened in (saved(3), step_done(3)):
        workplace.wait_for(NAME, happened, launched)
    ours = processes_of_run(launched.pid)
    launched.send_signal(signal.SIGKILL)
    workplace.finish(launched)
    assert not wait_until_gone(ours) and not forgotten(shared_memory)
    before = len(workplace.events(NAME))
    resumed = workplace.start("resume", NAME)
    workplace.wait_for(NAME, step_done(4), resumed, after=before)
    actor_of(resumed.pid, "collector-1.log").kill()
    return workplace.finish(resumed, timeout_s=300)


def test_a_killed_driver_and_a_killed_collector_change_no_number(
    workplace: Workplace, exported: Path, collected: Finished
) -> None:
    assert collected.code == 0, collected
    assert _learned(workplace, NAME) == _learned(workplace, "whole")
    ours = workplace.export(NAME, step=6)
    files = [path.name for path in exported.glob("*.safetensors")]
    assert files and all((ours / f).read_bytes() == (exported / f).read_bytes() for f in files)


def test_a_dead_collector_is_named_and_replaced(workplace: Workplace, collected: Finished) -> None:
    (replaced,) = (e for e in workplace.events(NAME) if e["event"] == "WorkerReplaced")
    assert replaced["worker"] == "collector 1", collected
    assert replaced["lost_samples"] == 0 and "from its journal" in replaced["source"]


def test_samples_are_written_where_they_are_and_read_by_a_resumed_run(
    workplace: Workplace, collected: Finished
) -> None:
    parts = {path.parent.name for path in workplace.run(NAME).rglob("*.journal")}
    assert {"collector-0", "collector-1"} <= parts, collected
