"""What dies is named, what is left is ended, and what was saved goes on. Real processes are killed
at work."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.chaos.oracle import OF_ENGINES, SECONDS
from tests.end_to_end.runs import (
    SECRET_NAME,
    Finished,
    Workplace,
    listening_beyond_loopback,
    processes_of_run,
    saved,
    step_done,
    wait_until_gone,
)
from tests.shared_memory import forgotten
from tests.waiting import until

LONG_S = 800.0
"""What a death and its replacement take at most."""


@dataclass
class Attempt:
    """A run at work, and what became of it."""

    driver: int
    """Process id."""
    processes: list[psutil.Process]
    finished: Finished | None = None
    left: list[object] = field(default_factory=list)
    """Processes and shared memory that outlived it."""


@contextmanager
def _attempt(
    workplace: Workplace, shared_memory: set[str], *command: str, reaches
) -> Iterator[Attempt]:
    """Start `miles`, wait for an event; the caller does harm, and the end is waited for."""
    name = command[-1]
    before = len(workplace.events(name))
    process = workplace.start(*command[:-1], *(["--name"] if command[0] == "launch" else []), name)
    workplace.wait_for(name, reaches, process, after=before)
    attempt = Attempt(driver=process.pid, processes=processes_of_run(process.pid))
    yield attempt
    attempt.finished = workplace.finish(process, timeout_s=300)
    attempt.left = [*wait_until_gone(attempt.processes), *forgotten(shared_memory)]


def _newest(workplace: Workplace, name: str) -> int:
    """Step of the newest checkpoint."""
    return max(
        event["step"] for event in workplace.events(name) if event["event"] == "CheckpointSaved"
    )


def _of(workplace: Workplace, name: str, kind: str) -> list[dict]:
    """Events of one kind."""
    return [event for event in workplace.events(name) if event["event"] == kind]


def _learned(workplace: Workplace, name: str) -> dict[int, dict]:
    """Step -> what was sampled and learned, without seconds, and without what the engines'
    log-probs say: which requests an engine computes together changes their last bit, and no
    token."""
    apart = (*SECONDS, *OF_ENGINES)
    return {
        event["step"]: {
            "report": {key: value for key, value in event["report"].items() if key not in apart},
            "rollout": event["rollout"],
        }
        for event in _of(workplace, name, "StepDone")
    }


def _writer(
    workplace: Workplace, name: str, attempt: Attempt, *, log: str, mark: str = ""
) -> psutil.Process:
    """The process of the run, with `mark` in its command line, that writes this log, as soon as
    there is one."""
    file = (workplace.run(name) / "logs" / "latest" / log).resolve()

    def writers() -> list[psutil.Process]:
        attempt.processes = processes_of_run(attempt.driver)
        return [process for process in attempt.processes if _writes(process, file, mark)]

    return until(writers, f"a process that writes {log}", within_s=LONG_S)[0]


def _writes(process: psutil.Process, file: Path, mark: str) -> bool:
    try:
        return mark in " ".join(process.cmdline()) and any(
            Path(opened.path) == file for opened in process.open_files()
        )
    except psutil.Error:  # it has just ended
        return False


def _bearers_of_secrets(attempt: Attempt) -> set[str]:
    """Which processes that the driver started have inherited one."""
    lines = [process.cmdline() for process in attempt.processes if SECRET_NAME in process.environ()]
    return {line[line.index("-m") + 1] if "-m" in line else " ".join(line) for line in lines}


@pytest.fixture(scope="module")
def terminated(workplace: Workplace, shared_memory: set[str]) -> Attempt:
    """Run `long`, of two engines, whose driver alone was sent SIGTERM, as a job scheduler does."""
    sets = ("--set", "train.steps=500", "--set", "checkpoint.every=2", "--set", "engines.num=2")
    launch = ("launch", "--recipe", "tiny.yaml", *sets, "long")
    with _attempt(workplace, shared_memory, *launch, reaches=saved(2)) as attempt:
        os.kill(attempt.driver, signal.SIGTERM)
    return attempt


@pytest.fixture
def resumed(workplace: Workplace, shared_memory: set[str], terminated: Attempt, request):
    """`with resumed() as attempt`: a copy of `long`, at work again, named as the test is."""
    name = request.node.name

    @contextmanager
    def resume(*options: str) -> Iterator[Attempt]:
        workplace.copy_run("long", name)
        reaches, command = step_done(_newest(workplace, name) + 1), ("resume", *options, name)
        with _attempt(workplace, shared_memory, *command, reaches=reaches) as attempt:
            yield attempt

    return resume


def test_a_terminated_run_saves_and_says_how_to_go_on(
    workplace: Workplace, terminated: Attempt
) -> None:
    assert terminated.finished.code == 75, terminated.finished
    assert "miles resume" in terminated.finished.err
    assert _newest(workplace, "long") >= 2
    assert terminated.left == []


ENGINES = [
    ("engine-0-server.log", "sglang::scheduler"),
    ("engine-1-server.log", "sglang::scheduler"),
]
RANK = ("trainer-rank-0.log", "ray::")
KEEPER = ("copy-keeper-0.log", "ray::")
"""(log, mark of the command line) of whoever is hurt."""
HARMS = (
    (ENGINES[1:], signal.SIGKILL),
    (ENGINES, signal.SIGKILL),
    ([KEEPER], signal.SIGKILL),
    ([RANK], signal.SIGKILL),
    (ENGINES[:1], signal.SIGSTOP),
    ([RANK], signal.SIGSTOP),
)
"""(who, what they are sent), one after the other."""


def test_what_dies_or_hangs_is_replaced_and_the_run_is_the_one_that_was_not_hurt(
    workplace: Workplace, resumed, shared_memory: set[str], request: pytest.FixtureRequest
) -> None:
    """One engine of two; both, so that requests wait for new ones; who keeps copies of the state of
    the trainer; the trainer, which goes on from one; an engine and the trainer that hang; and the
    driver, which is started again. The run that was not hurt ends with Ctrl-C."""
    name = request.node.name
    sets = ("--set", "machine.silence_s=10", "--set", "fault.copy_every=1")
    with resumed("--supervised", *sets) as attempt:
        for victims, harm in HARMS:
            attempt.processes = processes_of_run(attempt.driver)
            for log, mark in victims:
                _writer(workplace, name, attempt, log=log, mark=mark).send_signal(harm)
            healed = len(_of(workplace, name, "WorkerReplaced")) + len(victims)
            until(
                lambda healed=healed: len(_of(workplace, name, "WorkerReplaced")) >= healed,
                within_s=LONG_S,
            )
            reached = len(_of(workplace, name, "StepDone"))
            until(lambda n=reached: len(_of(workplace, name, "StepDone")) >= n + 2, within_s=LONG_S)
        num_attempts = len(list(workplace.run(name).glob("logs/attempt_*")))
        psutil.Process(attempt.driver).children()[0].kill()
        until(
            lambda: (
                len(_of(workplace, name, "StepDone")) >= reached + 4
                and (workplace.run(name) / "logs" / f"attempt_{num_attempts + 1}").exists()
            ),
            within_s=LONG_S,
        )
        attempt.processes = processes_of_run(attempt.driver)
        os.kill(attempt.driver, signal.SIGTERM)
    assert attempt.finished.code == 75, attempt.finished
    assert f"the driver of run {name} died" in attempt.finished.err
    assert f"attempt {num_attempts + 1}, restart 1 of at most 8" in attempt.finished.err
    report = workplace.run(name) / "logs" / f"attempt_{num_attempts}" / "why.txt"
    told = report.read_text()  # of its healings the last ones
    assert "ended by SIGKILL" in told and "trainer was back" in told
    ended = [event["outcome"] for event in _of(workplace, name, "RunEnded")]
    assert ended[-2:] == ["killed", "stopped"]
    lost = [event["worker"] for event in _of(workplace, name, "WorkerLost")]
    assert [lost[0], lost[-1], len(lost)] == ["engine 1", "trainer", 7]
    back = _of(workplace, name, "WorkerReplaced")
    assert "copy keeper" in {event["worker"] for event in back}
    sources = [event["source"] for event in back if event["worker"] == "trainer"]
    assert len(sources) == 2 and any("from the copy in memory" in source for source in sources)
    silent = {event["worker"] for event in _of(workplace, name, "WorkerSilent")}
    assert {"engine 0", "trainer rank 0"} <= silent
    assert "lost      engine 1" in attempt.finished.err
    assert "trainer rank 0" in attempt.finished.err
    assert attempt.left == []

    calm = f"{name}-calm"
    workplace.copy_run("long", calm)
    reaches = step_done(max(event["step"] for event in _of(workplace, name, "StepDone")))
    with _attempt(workplace, shared_memory, "resume", calm, reaches=reaches) as attempt:
        # a terminal sends it to the whole foreground process group, Ray's processes too
        os.killpg(attempt.driver, signal.SIGINT)
    assert attempt.finished.code == 75, attempt.finished
    assert "miles resume" in attempt.finished.err
    assert _newest(workplace, calm) >= max(_learned(workplace, name)), "saved what it reached"
    assert attempt.left == []
    hurt, unhurt = _learned(workplace, name), _learned(workplace, calm)
    assert len(hurt) >= 4
    assert {step: unhurt[step] for step in hurt} == hurt


def test_a_killed_engine_that_may_not_be_replaced_is_named_as_the_cause(
    workplace: Workplace, resumed, request: pytest.FixtureRequest
) -> None:
    name = request.node.name
    with resumed("--set", "fault.max_restarts=0") as attempt:
        assert listening_beyond_loopback(attempt.processes) == []
        assert _bearers_of_secrets(attempt) == {"milescli.workers.child"}
        log, mark = "engine-1-server.log", "sglang::scheduler"
        _writer(workplace, name, attempt, log=log, mark=mark).send_signal(signal.SIGKILL)
    finished = attempt.finished
    assert finished.code == 1, finished
    assert "engine 1" in finished.err and "Traceback (most recent call last)" not in finished.err
    assert "fault.max_restarts" in finished.err
    assert re.search(rf"or: miles resume runs/{name}   # goes on from step \d+\n", finished.err), (
        finished
    )
    verdict = json.loads((workplace.run(name) / "logs" / "latest" / "verdict.json").read_text())
    assert verdict["outcome"] == "failed"
    assert attempt.left == []
