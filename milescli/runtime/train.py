"""Trains a run, from a spec to a verdict: one attempt, with its listeners, and a summary at the
end. Called by launch and resume."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from milescli.autopsy.why import WHAT_IT_TELLS, write_why
from milescli.checkpoint.integrity import free_bytes
from milescli.checkpoint.run_dir import RunDir, resume_command, step_saved
from milescli.console.live import LiveRun
from milescli.console.output import Output
from milescli.core.driver_pipe import report_to_parent
from milescli.core.errors import (
    DISK_FULL,
    MachineError,
    MilesError,
    WaitTimeout,
    WorkerDied,
)
from milescli.core.events import EventBus, RunEnded
from milescli.core.history import History
from milescli.core.units import format_bytes
from milescli.insight.memory import DeviceMemory
from milescli.insight.reader import read_history
from milescli.runtime.attempt import Attempt
from milescli.runtime.prestart import Prestarted
from milescli.runtime.recording.alerting import alerting
from milescli.runtime.recording.listeners import VerdictEmitter, attach_run_files
from milescli.runtime.recording.tracking import tracking_run
from milescli.runtime.recovery.stops import BY_USER, check_stopped, immediate_end_error, stop_signal
from milescli.runtime.session import open_session
from milescli.runtime.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSummary:
    """Holds the results of one of several adapters; see RunSummary."""

    path: str
    steps: int
    accuracy_before: float | None
    accuracy_after: float | None
    logprob_diff_max: float
    checkpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Holds the results of a run."""

    path: str
    """The run directory."""
    steps: int
    """Completed steps over all attempts; with several adapters, the smallest number."""
    accuracy_before: float | None
    """On held-out prompts, before the first step; None without `data.eval`."""
    accuracy_after: float | None
    loss_before: float | None
    """On held-out rows, before the first step; None without `data.validation`."""
    loss_after: float | None
    logprob_diff_max: float | None
    """Largest |engine - trainer| over all steps; None if nothing was sampled."""
    logprob_diff_mean: float | None
    checkpoint: str | None
    """Newest complete checkpoint; None if each adapter has its own."""
    seconds: float
    """Seconds of this attempt, including start-up and shut-down."""
    adapters: Mapping[str, AdapterSummary] = field(default_factory=dict)
    """Summary of each of several adapters."""
    memory: list[DeviceMemory] = field(default_factory=list)
    """Peak memory of each process or device, and what was planned for it."""


def train(spec: RunSpec, *, prestarted: Prestarted, output: Output) -> RunSummary:
    """Train to the recipe's last step. If that fails, raises the cause after everything is stopped
    and the verdict is written."""
    began = time.monotonic()
    check_stopped()
    run, recipe, bus = spec.run, spec.recipe, EventBus()
    log_dir = run.new_attempt()
    report_to_parent(
        run=run.path,
        log_dir=log_dir,
        max_restarts=recipe.fault.max_restarts,
        window_s=recipe.fault.window_s,
        num_steps=spec.num_steps,
    )
    attach_run_files(bus, run, has_scalars=not spec.adapters)
    judge = VerdictEmitter(run, bus)
    bus.listeners.append(judge)
    with (
        alerting(run, recipe.run, bus=bus, output=output),
        tracking_run(spec, bus=bus, output=output) as tracking,
        LiveRun(output, name=run.name, history=read_history(run)) as live,
    ):
        bus.listeners.append(live)
        with open_session(spec, prestarted=prestarted, log_dir=log_dir) as session, tracking:
            check_stopped()
            attempt = Attempt(spec, session=session, bus=bus)
            try:
                asyncio.run(attempt.main())
            except BaseException as caught:
                error = explain_error(caught, run)
                saved = attempt.saved_step
                offer_resume(error, run.shown, step=saved, num_steps=spec.num_steps)
                # what ended the run is said, also where it can no longer be written down
                with suppress(OSError):
                    judge.conclude()
                    _conclude(attempt, time.monotonic() - began, error)
                    write_why(log_dir)
                if error is caught:
                    raise
                raise error from caught
            judge.conclude()
            with attempt.side.writing(session.verdict_file):
                _conclude(attempt, time.monotonic() - began, None)
        with attempt.side.writing(run.picture_file):
            live.save_svg(run.picture_file, command=f"miles launch --recipe {recipe.name}")
    history = live.history
    accuracies, losses = _accuracies(history), {one.step: one.loss for one in history.validations}
    diff_max, diff_mean = _logprob_diffs([*history.adapters.values()] or [history])
    return RunSummary(
        path=run.shown,
        steps=attempt.step,
        accuracy_before=_first(accuracies),
        accuracy_after=accuracies.get(attempt.step),
        loss_before=_first(losses),
        loss_after=losses.get(attempt.step),
        logprob_diff_max=None if recipe.learns_from_rows else diff_max,
        logprob_diff_mean=None if recipe.learns_from_rows else diff_mean,
        checkpoint=None if spec.adapters else _name_of(attempt.trainings[0].saver.newest),
        seconds=time.monotonic() - began,
        adapters=_adapter_summaries(attempt, history.adapters) if spec.adapters else {},
        memory=judge.memory(),
    )


def _name_of(checkpoint: Path | None) -> str:
    return checkpoint.name if checkpoint else ""


def _accuracies(history: History) -> dict[int, float]:
    return {one.step: one.accuracy for one in history.evaluations}


def _logprob_diffs(histories: Sequence[History]) -> tuple[float, float]:
    """Return the largest and the mean |engine - trainer| over all steps of the histories."""
    largest = [x for one in histories for x in one.columns.get("train/logprob_diff_max")]
    means = [x for one in histories for x in one.columns.get("train/logprob_diff_mean")]
    return max([0.0, *largest]), sum(means) / max(len(means), 1)


def _adapter_summaries(
    attempt: Attempt, histories: Mapping[str, History]
) -> dict[str, AdapterSummary]:
    names = [one.adapter or "" for one in attempt.trainings]
    own = {name: histories.get(name, History(name=name)) for name in names}
    return {
        name: AdapterSummary(
            path=one.spec.run.shown,
            steps=one.step,
            accuracy_before=_first(_accuracies(own[name])),
            accuracy_after=_accuracies(own[name]).get(one.step),
            logprob_diff_max=_logprob_diffs([own[name]])[0],
            checkpoint=_name_of(one.saver.newest),
        )
        for name, one in zip(names, attempt.trainings, strict=True)
    }


def _first(figures: dict[int, float]) -> float | None:
    return figures[min(figures)] if figures else None


def explain_error(error: BaseException, run: RunDir) -> BaseException:
    """Return the error in the form for users: a full disk is never a fault of ours; a signal during
    shutdown does not replace the original cause; any other error is returned unchanged."""
    if (number := stop_signal(error)) is not None:
        if (cause := _original_error(error)) is not None:
            return cause
        fix = resume_command(run.shown, step=step_saved(run.events()))
        return immediate_end_error(number, fix=fix, is_second=True)
    if not isinstance(error, OSError) or error.errno not in DISK_FULL:
        return error
    return MachineError(
        "the disk is full",
        why=f"{error}; {format_bytes(free_bytes(run.path))} are free in {run.path}",
        fix=f"du -sh {shlex.quote(str(run.path.parent))}/*   # free some space, or set "
        "run.dir and checkpoint.keep",
    )


def _original_error(error: BaseException) -> MilesError | None:
    """Return the error that was ending the run when `error` came."""
    context = error.__context__
    while context is not None and not isinstance(context, MilesError):
        context = context.__context__
    return context


def offer_resume(
    error: BaseException, shown: str, *, step: int | None, num_steps: int | None = None
) -> None:
    """Add the command that resumes the run to the fixes of an error that lost a process: only the
    work after the newest checkpoint, that of `step`, is lost. None: there is no checkpoint.
    `shown`: the run, as its user calls it; `num_steps`: of the whole run."""
    if isinstance(error, WorkerDied | WaitTimeout | MachineError):
        error.fixes.append(resume_command(shown, step=step, num_steps=num_steps))
        error.fixes.append(f"miles why {shlex.quote(shown)}   # {WHAT_IT_TELLS}")


def _conclude(attempt: Attempt, seconds: float, error: BaseException | None) -> None:
    outcome = "done" if error is None else "stopped" if isinstance(error, BY_USER) else "failed"
    cause = None
    if error is not None:
        cause = error.as_dict() if isinstance(error, MilesError) else {"error": repr(error)}
    attempt.report_end(RunEnded(outcome=outcome, step=attempt.step, seconds=seconds, error=cause))
    verdict = {"outcome": outcome, "step": attempt.step, "error": cause}
    attempt.session.verdict_file.write_text(json.dumps(verdict) + "\n", encoding="utf-8")
