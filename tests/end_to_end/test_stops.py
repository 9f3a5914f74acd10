"""Whenever its user stops a run, its state is `stopped`, nothing of it is left behind, and `miles
resume` goes on with what was learned."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from itertools import pairwise

import psutil

from tests.end_to_end.runs import Finished, Workplace, learned, step_done, wait_until_gone
from tests.shared_memory import forgotten
from tests.waiting import until

AT_ONCE = {signal.SIGINT: 130, signal.SIGTERM: 143}


def _state(workplace: Workplace, name: str) -> str:
    listed = json.loads(workplace.miles("runs", "--json").out.splitlines()[-1])["runs"]
    return next(run["state"] for run in listed if run["name"] == name)


def _until_prepared(workplace: Workplace, name: str, process: subprocess.Popen[str]) -> None:
    """Wait until the run has its recipe, and nothing else is there."""
    file = workplace.run(name) / "recipe.yaml"
    until(lambda: file.exists() or process.poll() is not None)
    assert process.poll() is None


def _phase(phase: str) -> Callable[[dict], bool]:
    return lambda event: event.get("phase") == phase


def _warm_up_step(event: dict) -> bool:
    return event["event"] == "WarmupStepDone"


def _stopped(
    workplace: Workplace,
    process: subprocess.Popen[str],
    *,
    number: signal.Signals,
    twice: bool = False,
) -> Finished:
    """Stop a run as its user does; returns how it ended, when nothing of it is left."""
    ours = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    if twice:
        process.send_signal(number)
    finished = workplace.finish(process, timeout_s=300)
    assert wait_until_gone(ours) == []
    return finished


LONG_WARM_UP = ("--set", "warmup.steps=150", "--set", "train.steps=2", "--set", "eval.every=0")
"""So long that a signal behind its first step comes before its last."""


def test_what_was_learned_in_a_warm_up_is_saved_and_gone_on_with(
    workplace: Workplace, shared_memory: set[str]
) -> None:
    command = ["launch", "--recipe", "tiny.yaml", *LONG_WARM_UP, "--name"]
    calm = workplace.start(*command, "calm")
    workplace.wait_for("calm", _warm_up_step, calm)
    again = workplace.miles(*command, "calm")
    assert again.code == 3 and "is running" in again.err and "miles status" in again.err, again
    finished = workplace.finish(calm)
    assert finished.code == 0, finished

    process = workplace.start(*command, "early")
    workplace.wait_for("early", _warm_up_step, process)
    finished = _stopped(workplace, process, number=signal.SIGINT)
    assert finished.code == 75 and "of the warm-up, and saved" in finished.err, finished
    assert _state(workplace, "early") == "stopped" and forgotten(shared_memory) == set()
    again = workplace.miles(*command, "early")
    assert again.code == 3 and "continue the stopped run" in again.err, again
    resumed = workplace.miles("resume", "early")
    assert resumed.code == 0 and "of the warm-up" in resumed.err, resumed
    steps = [event["step"] for event in workplace.events("early") if _warm_up_step(event)]
    assert steps == [*range(1, 151)]
    assert [*map(learned, workplace.steps("early"))] == [*map(learned, workplace.steps("calm"))]


MOMENTS: list[tuple[str, Callable[[dict], bool] | None, signal.Signals, bool]] = [
    ("while its data is prepared", None, signal.SIGINT, False),
    ("while processes start", _phase("start"), signal.SIGTERM, False),
    ("in the warm-up, at once", _warm_up_step, signal.SIGINT, True),
    ("in the warm-up", _warm_up_step, signal.SIGTERM, False),
    ("in the check", _phase("check"), signal.SIGINT, False),
    ("in an evaluation", _phase("eval"), signal.SIGTERM, False),
    ("in a rollout", _phase("train"), signal.SIGINT, False),
    ("after a step, at once", step_done(1), signal.SIGTERM, True),
]


def test_one_run_is_stopped_at_every_moment(workplace: Workplace, shared_memory: set[str]) -> None:
    sets = ("--set", "warmup.steps=60", "--set", "train.steps=400")
    command = ["launch", "--recipe", "tiny.yaml", *sets, "--name", "often"]
    for moment, reaches, number, twice in MOMENTS:
        before = len(workplace.events("often"))
        process = workplace.start(*command)
        if reaches is None:
            _until_prepared(workplace, "often", process)
        else:
            workplace.wait_for("often", reaches, process, after=before)
        finished = _stopped(workplace, process, number=number, twice=twice)
        assert finished.code in (75, AT_ONCE[number]), (moment, finished)
        assert "miles resume" in finished.err, (moment, finished)
        assert _state(workplace, "often") == "stopped", (moment, finished)
        assert forgotten(shared_memory) == set(), moment
        command = ["resume", "often"]
    steps = [event["step"] for event in workplace.events("often") if _warm_up_step(event)]
    assert all(after in (before + 1, 1) for before, after in pairwise(steps))
