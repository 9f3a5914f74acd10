"""One trial: a run is started, hurt at its moment, waited for, resumed where it ended, and held
against the run that was left alone. Called by `run` and by tests."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.faults import VICTIMS_OF_MANY, Ending, Moment, Trial
from tests.chaos.machine import HARMS, Scene, stage, why_impossible
from tests.chaos.oracle import compared, losses_that_differ
from tests.chaos.place import EVERY, LONGEST_S, Attempt, Place, usual_seconds
from tests.shared_memory import entries, forgotten

WINDOW_S: Mapping[Moment, float] = {
    Moment.START: 2.0,
    Moment.WARMUP: 0.5,
    Moment.CHECK: 0.8,
    Moment.EVAL: 1.0,
}
"""How long these last, of a tiny run; of the start: from when the victim is there."""
LATEST_STEP = 10
"""After which a run is hurt: what stops must be missed by what is left of its steps."""
GONE_WITHIN_S = 30.0
ON_CHECKPOINTS = ("flip", "tear", "unlink", "remove")
"""Harms of the newest checkpoint, between a run and its `resume`."""


@dataclass
class Outcome:
    """What a trial came to."""

    trial: Trial
    instant: str = ""
    ending: Ending | None = None
    next_step_s: float | None = None
    """From the harm to the next step after the replacement; of a run that ended: to its end."""
    kills: int = 0
    skipped: str = ""
    """Why this machine cannot do it."""
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def perform(trial: Trial, place: Place, *, name: str = "hurt") -> Outcome:
    """Do it. Takes a minute, and another for the calm run where it is the first of its recipe."""
    outcome = Outcome(trial)
    if reason := why_impossible(trial.fault):
        outcome.skipped = reason
        return outcome
    with stage(trial.fault, place, name) as where:
        _perform(outcome, where, name)
    return outcome


def _perform(outcome: Outcome, place: Place, name: str) -> None:
    trial, fault = outcome.trial, outcome.trial.fault
    calm = place.calm(fault.sets)
    before = entries()
    place.wish.unlink(missing_ok=True)
    attempt = place.launch(name, sets=fault.sets, options=fault.options)
    try:
        hurt_at = _hurt(attempt, outcome, trial.chance(), usual_seconds(calm), place)
        code = attempt.end(within_s=fault.within_s + LONGEST_S)
    except TimeoutError as error:
        outcome.wrong.append(f"{error}; it said last:\n{attempt.said[-2000:]}")
        attempt.kill()
        return
    ended_at = time.monotonic()
    outcome.left = _left(attempt, before, place)
    _judge(attempt, outcome, code, hurt_at, ended_at)
    if outcome.ending in (Ending.NAMED, Ending.STOPPED):
        _go_on(place, name, trial, outcome)
    outcome.wrong += compared(place.run(name), calm, fault.compared)
    outcome.wrong += [f"left: {thing}" for thing in outcome.left]


def _hurt(
    attempt: Attempt,
    outcome: Outcome,
    chance: random.Random,
    usual: Mapping[str, float],
    place: Place,
) -> float:
    """Wait for the moment and do the harm; returns when that was."""
    fault, moment = outcome.trial.fault, outcome.trial.moment
    offset_s = _wait_for_moment(attempt, outcome, chance, usual)
    victims = _victims(attempt, fault.victim) if fault.victim else []
    time.sleep(offset_s)
    last_role = ""
    for number in range(fault.times):
        role = fault.victim
        if fault.times > 1:
            # never the same twice: the third of one cause at one step rightly ends a run
            role = chance.choice([other for other in VICTIMS_OF_MANY if other != last_role])
            last_role = role
            # counted from the last step or replacement, whatever it takes to find the victim
            due = attempt.events[-1][0] + chance.uniform(0, 0.9 * usual["step_s"])
            victims = _victims(attempt, role)
            time.sleep(max(0.0, due - time.monotonic()))
        hurt_at = time.monotonic()
        if fault.harm.startswith("SIG"):
            assert victims, f"nobody is {role} at {moment}"
            _send(victims[0], fault.harm)
            outcome.kills += 1
        elif fault.harm in HARMS:
            scene = Scene(attempt=attempt, place=place, victims=victims, chance=chance)
            outcome.instant += f", {HARMS[fault.harm].do(scene)}"
        elif fault.harm in ON_CHECKPOINTS:
            os.kill(attempt.process.pid, signal.SIGTERM)
        else:
            place.wish.write_text(fault.harm)
        if fault.second is not None:
            _hurt_again(attempt, outcome, chance, hurt_at)
        if fault.times > 1 and not _is_healed(attempt, number + 1, fault.within_s, role):
            break
    return hurt_at


def _hurt_again(attempt: Attempt, outcome: Outcome, chance: random.Random, hurt_at: float) -> None:
    """The second harm, some seconds after the first."""
    second = outcome.trial.fault.second
    assert second is not None, "one harm alone"
    after_s = chance.uniform(*second.after_s)
    victims = _victims(attempt, second.victim)
    while (wait_s := hurt_at + after_s - time.monotonic()) > 0:
        attempt.look()
        time.sleep(min(wait_s, 0.02))
    _send(victims[0], second.harm)
    outcome.instant += f", then {after_s:.2f} s"


def _wait_for_moment(
    attempt: Attempt, outcome: Outcome, chance: random.Random, usual: Mapping[str, float]
) -> float:
    """Until what it begins with has happened; returns the seconds from there on."""
    moment = outcome.trial.moment
    if moment is Moment.START:
        offset_s = chance.uniform(0, WINDOW_S[moment])
        outcome.instant = f"{offset_s:.3f} s after the victim was there"
        return offset_s
    if moment in WINDOW_S:
        offset_s = chance.uniform(0, WINDOW_S[moment])
        phase = str(moment)
        _reach(attempt, lambda e: e["event"] == "PhaseStarted" and e["phase"] == phase, phase)
        outcome.instant = f"{offset_s:.3f} s after it began"
        return offset_s
    step = 1 if outcome.trial.fault.times > 1 else chance.randint(EVERY, LATEST_STEP)
    begin, length = {
        Moment.ROLLOUT: (0.0, usual["rollout_s"]),
        Moment.TRAIN: (usual["rollout_s"], usual["train_s"]),
        Moment.PUBLISH: (usual["rollout_s"] + usual["train_s"], usual["publish_s"]),
        Moment.SAVE: (0.0, usual["save_s"]),
    }[moment]
    if moment is Moment.SAVE:
        step -= step % EVERY
    offset_s = begin + chance.uniform(0, length)
    _reach(attempt, lambda e: e["event"] == "StepDone" and e["step"] == step, f"step {step}")
    outcome.instant = f"{offset_s:.3f} s after step {step}"
    return offset_s


def _reach(attempt: Attempt, condition: Callable[[dict], bool], what: str) -> None:
    if not attempt.wait_for(condition, within_s=LONGEST_S, what=what):
        raise TimeoutError(f"the run ended before {what}")


def _victims(attempt: Attempt, role: str) -> list[psutil.Process]:
    """As soon as there are any."""
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline and attempt.process.poll() is None:
        if victims := attempt.processes.find(role):
            return victims
        time.sleep(0.02)
    raise TimeoutError(f"nobody is {role}")


def _send(victim: psutil.Process, harm: str) -> None:
    try:
        victim.send_signal(getattr(signal, harm))
    except psutil.NoSuchProcess:
        return


def _is_healed(attempt: Attempt, times: int, within_s: float, role: str) -> bool:
    """Wait until it was healed so often; False where the run ended."""
    replaced = sum(event["event"] == "WorkerReplaced" for _, event in attempt.events)

    def heard(event: dict) -> bool:
        nonlocal replaced
        replaced += event["event"] == "WorkerReplaced"
        return replaced >= times

    return attempt.wait_for(heard, within_s=within_s, what=f"kill {times}, of {role}")


def _judge(attempt: Attempt, outcome: Outcome, code: int, hurt_at: float, ended_at: float) -> None:
    """How it ended, and whether it might end so."""
    fault, said = outcome.trial.fault, attempt.said
    if fault.victim == "" and outcome.kills < fault.times and fault.times > 1:
        outcome.wrong.append(f"the run ended after {outcome.kills} of {fault.times}")
    events = [event for _, event in attempt.events]
    outcome.ending = ending_of(code, said, events, num_attempts=_num_attempts(attempt.run))
    wanted = fault.endings_at(outcome.trial.moment)
    if outcome.ending not in wanted:
        outcome.wrong.append(
            f"exit code {code}, {outcome.ending}, not {' or '.join(wanted)}:\n{said[-1500:]}"
        )
    if "\nTraceback (most recent" in f"\n{said}":
        outcome.wrong.append(f"a traceback on the terminal:\n{said[-1500:]}")
    if outcome.ending in (Ending.NAMED, Ending.RESTARTED) and fault.said not in said:
        outcome.wrong.append(f"the error does not name {fault.said}:\n{said[-1500:]}")
    if outcome.ending is Ending.HEALED:
        bound_s = fault.within_s
        named = "" if fault.times > 1 or fault.second else fault.said
        outcome.wrong += losses_that_differ(events, said=named, within_s=bound_s)
    outcome.next_step_s = _next_step_s(attempt, outcome.ending, hurt_at, ended_at)
    if outcome.next_step_s is not None and outcome.next_step_s > fault.within_s:
        outcome.wrong.append(f"{outcome.next_step_s:.0f} s, at most {fault.within_s:.0f} s are due")


def ending_of(code: int, said: str, events: list[dict], *, num_attempts: int) -> Ending | None:
    """How a run ended; None: as none may."""
    if code == 0 and num_attempts > 1:
        return Ending.RESTARTED
    if code == 0:
        is_healed = any(event["event"] == "WorkerReplaced" for event in events)
        return Ending.HEALED if is_healed else Ending.UNHURT
    if code == 75 or code < 0:
        return Ending.STOPPED
    parts = all(part in said for part in ("error:", "why:", "fix:"))
    return Ending.NAMED if parts and code != 70 else None


def _num_attempts(run: Path) -> int:
    return len(list(run.glob("logs/attempt_*")))


def _next_step_s(
    attempt: Attempt, ending: Ending | None, hurt_at: float, ended_at: float
) -> float | None:
    """See Outcome; None where nothing was lost."""
    if ending in (Ending.NAMED, Ending.STOPPED):
        return ended_at - hurt_at
    marks = {Ending.HEALED: "WorkerReplaced", Ending.RESTARTED: "RunEnded"}
    after = None
    for when, event in attempt.events:
        if when < hurt_at:
            continue
        if after is not None and event["event"] in ("StepDone", "WarmupStepDone"):
            return when - hurt_at
        if event["event"] == marks.get(ending):
            after = when
    return None if after is None else after - hurt_at


def _go_on(place: Place, name: str, trial: Trial, outcome: Outcome) -> None:
    """`miles resume` does the rest; begun anew where there was no run yet."""
    fault, run = trial.fault, place.run(name)
    if fault.harm in ON_CHECKPOINTS:
        _hurt_newest(run, fault.harm, trial.chance())
    if fault.harm in HARMS:
        HARMS[fault.harm].undo(place, name)
    before = entries()
    attempt = place.resume(name) if run.exists() else place.launch(name, sets=fault.sets)
    try:
        code = attempt.end(within_s=LONGEST_S)
    except TimeoutError as error:
        outcome.wrong.append(f"resume: {error}")
        attempt.kill()
        return
    # hurt when all was done and saved, there was nothing to go on with
    if code != 0 and "has completed all" not in attempt.said:
        outcome.wrong.append(f"resume ended with {code}:\n{attempt.said[-1500:]}")
    if fault.harm in ON_CHECKPOINTS and fault.said not in attempt.said:
        outcome.wrong.append(f"resume does not say {fault.said}:\n{attempt.said[-1500:]}")
    outcome.left += _left(attempt, before, place)


def _hurt_newest(run: Path, harm: str, chance: random.Random) -> None:
    """The newest checkpoint, in a random one of its files."""
    newest = max(run.glob("checkpoints/step_*"), key=lambda path: int(path.name[5:]))
    if harm == "remove":
        shutil.rmtree(newest)
        return
    file = chance.choice(sorted(path for path in newest.iterdir() if path.is_file()))
    data = bytearray(file.read_bytes())
    place = chance.randrange(len(data))
    if harm == "flip":
        data[place] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
    elif harm == "tear":
        file.write_bytes(data[:place])
    else:
        file.unlink()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[-120:]
    except psutil.Error:
        return "that has just ended"


def _left(attempt: Attempt, shared_memory: set[str], place: Place) -> list[str]:
    """Processes, folders and shared memory that outlive a run."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while True:
        there = (*attempt.processes.all(), *attempt.processes.watchdogs())
        left = [f"process {process.pid} {_title(process)}" for process in there]
        left += [str(path) for path in attempt.processes.temp_dirs if path.exists()]
        left += place.left()
        left += [f"/dev/shm/{name}" for name in forgotten(shared_memory)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)
