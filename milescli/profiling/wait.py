"""Requests a profile of a running run, and waits for it: the part of `miles profile` before there
is anything to show."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from milescli.checkpoint.run_dir import RunDir, is_locked, step_done
from milescli.checkpoint.run_lock import state_of
from milescli.core.errors import MilesError, RecipeError, WaitTimeout
from milescli.core.files import last_records
from milescli.core.scalars import STEP_EVENTS
from milescli.core.units import format_duration
from milescli.plan.types import Plan
from milescli.profiling import request as files
from milescli.profiling.request import Progress, Request, State

POLL_S = 0.25
MIN_BOUND_S = 300.0
"""Shortest bound on the silence of the run: an evaluation or a save may take this long."""
STEPS_OF_SILENCE = 5.0
"""Longest silence as a multiple of the duration of its last step, if that is longer."""
SPARE_STEPS = 3
"""Steps, beyond those to wait for, after which the driver must have ignored the request."""
MORE_STEPS = 20
"""Number of further steps for a run that has completed all of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Holds the pace of a run, from its events."""

    step: int | None
    """Last completed step; None if there is none."""
    step_s: float
    """Seconds that a step took; 0: unknown."""
    silent_s: float
    """Seconds since its last event."""

    @property
    def bound_s(self) -> float:
        """Return the longest plausible silence of the run, in seconds."""
        return max(MIN_BOUND_S, STEPS_OF_SILENCE * self.step_s)

    def described(self) -> str:
        """Format the pace for people."""
        if self.step is None:
            return f"it has not done a step yet, and last spoke {self.silent_s:.0f} s ago"
        last = f"step {self.step}, which took {format_duration(self.step_s)}"
        return f"it last did {last}, and spoke {self.silent_s:.0f} s ago"


def require_running(run: RunDir, *, command: str) -> None:
    """Raise MilesError if no driver works on the run."""
    if (state := state_of(run)) == "running":
        return
    events = list(run.events())
    totals = [int(str(e["num_steps"])) for e in events if e.get("event") in STEP_EVENTS]
    is_through = bool(totals) and step_done(events) >= totals[-1]
    further = f" --steps {totals[-1] + MORE_STEPS}" if is_through else ""
    raise MilesError(
        f"run `{run.name}` is not running",
        why=f"only steps that run now can be profiled; its state is {state}",
        fix=[f"miles resume {run.typed}{further}", f"{command}   # while it runs"],
    )


def plan_of(run: RunDir) -> Plan:
    """Read the run's plan."""
    return Plan.read(run.plan_file)


def check(run: RunDir, plan: Plan, *, ranks: list[int], engines: list[int]) -> None:
    """Raise RecipeError if the run has no such rank or engine."""
    counts = (
        ("trainer rank", "--ranks", ranks, plan.trainer.world_size),
        ("engine", "--engines", engines, plan.engines.num),
    )
    for what, option, numbers, count in counts:
        if wrong := [number for number in numbers if not 0 <= number < count]:
            there = f"0 to {count - 1}" if count else "none"
            raise RecipeError(
                f"run `{run.name}` has no {what} {wrong[0]}",
                why=f"its plan has {count}: {there}",
                fix=f"{option} 0" if count else f"remove {option}",
            )


def request_profile(run: RunDir, wanted: Request, *, tell: Callable[[str], None]) -> State:
    """Request a profile and wait until it is done; an interrupted wait cancels the request. Raises
    MilesError if the run ends meanwhile or another request is pending, WaitTimeout after a long
    silence of the run."""
    files.write_request(run, wanted)
    try:
        return _wait(run, wanted, tell=tell)
    except BaseException:
        files.cancel_request(run, wanted.number)
        raise


def _wait(run: RunDir, wanted: Request, *, tell: Callable[[str], None]) -> State:
    began, shown, at_first = time.monotonic(), None, pace(run)
    tell(f"asked {run.name} for {wanted.steps} steps; {at_first.described()}")
    while True:
        is_alive = is_locked(run)  # looked at first: what a driver wrote last is there by then
        state = files.read_state(run, wanted.number)
        if state is not None and state.progress is Progress.DONE:
            return state
        if not is_alive or (state is not None and state.progress is Progress.ENDED):
            raise MilesError(
                f"run `{run.name}` ended before the profile was finished",
                why="its driver is no longer running" if not is_alive else "its attempt failed",
                fix=[f"miles why {run.typed}", f"miles resume {run.typed}"],
            )
        now = pace(run)
        if state is not None and shown is None:
            shown = f"profiling from step {state.first_step} on"
            tell(shown)
        due = (at_first.step or 0) if state is None else state.first_step + wanted.steps
        if not run.adapters_dir.exists() and (now.step or 0) > due + SPARE_STEPS:
            raise _ignored_error(run, now.step or 0)
        silent_s = min(now.silent_s, time.monotonic() - began)
        if silent_s > now.bound_s:
            raise WaitTimeout(
                f"waited {silent_s:.0f} s for the driver of `{run.name}` to "
                f"{'end' if state else 'begin'} profile {wanted.number}",
                why=f"{now.described()}; the limit is {now.bound_s:.0f} s without an event",
                fix=[
                    f"tail {shlex.quote(str(run.events_file))}",
                    f"ls {shlex.quote(str(run.path / 'logs' / 'latest'))}",
                ],
            )
        time.sleep(POLL_S)


def _ignored_error(run: RunDir, step: int) -> MilesError:
    """Return the error that the run makes steps but nobody takes the request or ends the
    profile."""
    return MilesError(
        f"the driver of `{run.name}` does not record profiles",
        why=f"it is at step {step} and ignored the request: it belongs to an older miles or to "
        "another user, or it cannot write to its disk",
        fix=[
            f"ls -l {shlex.quote(str(run.profiles_dir))}   # who owns the run?",
            f"Ctrl-C, then miles resume {run.typed}   # with this version",
        ],
    )


def pace(run: RunDir) -> Pace:
    """Compute the pace from the end of the run's events alone, since a long run has many."""
    step, step_s, silent_s = None, 0.0, 0.0
    with suppress(OSError):
        silent_s = max(time.time() - run.events_file.stat().st_mtime, 0.0)
    for event in last_records(run.events_file):
        if event.get("event") in STEP_EVENTS:
            step = int(event["step"])
            step_s = float(event.get("step_s") or event.get("seconds", {}).get("step_s", 0.0))
            break
    return Pace(step=step, step_s=step_s, silent_s=silent_s)
