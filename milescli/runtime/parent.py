"""The small process behind `miles launch` and `miles resume`: it starts the driver, speaks where
that dies without a word, and with `--supervised` starts it again. Imports nothing heavy."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milescli.autopsy.write import WHAT_IT_TELLS, write_why
from milescli.checkpoint.run_dir import (
    RunDir,
    resume_command,
    step_done,
    step_saved,
    verdict_file,
)
from milescli.cluster.clean_up import wait_for_clean_up
from milescli.core import errors
from milescli.core.driver_pipe import Said
from milescli.core.errors import (
    ExitCode,
    MilesError,
    NodesJoined,
    Stopped,
    WorkerDied,
)
from milescli.core.events import RunEnded, stamped
from milescli.platform.oom import oom_kills
from milescli.recipe.machine import Fault
from milescli.runtime.child import Ended, run_in_child
from milescli.runtime.restarts import Restarts
from milescli.runtime.side_files import LineFile
from milescli.runtime.supervise import ended_now

if TYPE_CHECKING:
    from milescli.console.output import Output

OTHER_NODES = ("NodeDied", "NodesJoined")
"""Kinds of errors that a run goes on after in any case: `machine.on_node_loss` says how."""
MENDABLE = (*OTHER_NODES, "WorkerDied", "WorkerKilled", "WaitTimeout", "MachineError")
"""Kinds of errors that another attempt may not meet: nothing is to be changed by the user."""
PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Before a driver is started again: the first time, twice that the second time, and so on."""


@dataclass(slots=True, kw_only=True)
class Parent:
    """Of the drivers of one run, one after the other."""

    output: Output
    again: str
    """The command to begin with, for the error of a driver that died before its run was made."""
    resume: Callable[[Path], None]
    """Goes on with a run."""
    mends: Collection[str]
    """Kinds of errors after which it does: MENDABLE where it is supervised, else OTHER_NODES."""
    _run: RunDir | None = None
    _has_begun: bool = False
    """An attempt has; what ends the first one before that is a machine that is not ready."""
    _limits: Fault = field(default_factory=Fault)
    _num_steps: int | None = None
    """That the run is to do; None: it has not said. When they are saved there is nothing to go on
    with."""

    def drive(self, work: Callable[[], None]) -> int:
        """Start `work` in a driver; returns the exit code of the last one, whose user was told
        everything. Raises WorkerDied where it died without a word."""
        restarts: Restarts | None = None
        while True:
            oom_before = oom_kills()
            ended = run_in_child(work, on_hold=self._tell_of_hold)
            if ended is None:  # this is the driver, at its end
                return ExitCode.DONE
            error = self._error_of(ended, oom_before=oom_before)
            was_told = error is None or "code" in ended.said
            if restarts is None:
                restarts = Restarts(limits=self._limits)
            if error is None or not self._may_mend(ended, error):
                if not was_told and error is not None:
                    raise error
                return _code_of(ended)
            run = self._run
            assert run is not None, "nothing to go on with"
            if isinstance(error, NodesJoined):
                self.output.note(f"{run.name} begins again: attempt {len(run.attempts()) + 1}")
            else:
                self._pause_after(error, run, restarts, was_told=was_told)
            self._has_begun, work = True, partial(self.resume, run.path)

    def _pause_after(
        self, error: MilesError, run: RunDir, restarts: Restarts, *, was_told: bool
    ) -> None:
        """Raises the error where bounds are met."""
        step = step_done(run.events())
        if refusal := restarts.refusal(f"{type(error).__name__}: {error.what}", step):
            raise type(error)(error.what, why=f"{error.why}\n{refusal}", fix=error.fixes)
        if not was_told:
            self.output.error(error)
        pause_s = min(PAUSE_S * 2 ** (restarts.total - 1), LONGEST_PAUSE_S)
        self.output.warn(
            f"{run.name} is started again from its newest checkpoint in {pause_s:.0f} s: "
            f"attempt {len(run.attempts()) + 1}, restart {restarts.total} of at most "
            f"{self._limits.max_restarts} within {self._limits.window_s:g} s"
        )
        _pause(pause_s, run)

    def _tell_of_hold(self, driver: int) -> None:
        self.output.warn(
            f"the driver (process {driver}) is stopped by SIGSTOP, and the run waits for it: "
            f"`kill -CONT {driver}` lets it go on; Ctrl-C saves and ends it, as ever"
        )

    def _may_mend(self, ended: Ended, error: MilesError) -> bool:
        return (
            self._run is not None
            and self._run.is_run
            and (self._num_steps is None or step_saved(self._run.events()) != self._num_steps)
            and ended.stopped_by is None
            and type(error).__name__ in self.mends
            and (self._has_begun or "log_dir" in ended.said)
        )

    def _error_of(self, ended: Ended, *, oom_before: int | None) -> MilesError | None:
        """What ended it, told to the user or not yet; None where it did what it should, or the user
        ended it."""
        said = ended.said
        if "max_restarts" in said:
            self._limits = Fault(max_restarts=said["max_restarts"], window_s=said["window_s"])
            self._num_steps = said.get("num_steps")
        if "run" in said:
            self._run = RunDir(Path(said["run"]))
        if "code" in said:
            return _as_error(said["error"]) if said["code"] and "error" in said else None
        self.output.give_back_terminal()
        _wait_for_clean_up(said)
        run = self._run if self._run is not None and self._run.is_run else None
        go_on = self.again
        if run is not None:
            saved = step_saved(run.events())
            go_on = resume_command(run.shown, step=saved, num_steps=self._num_steps)
        if ended.stopped_by in (signal.SIGINT, signal.SIGTERM):
            error = ended_now(ended.stopped_by, fix=go_on)
        else:
            error = _cause(ended, run, oom_before=oom_before)
            error.fixes.insert(0, go_on)
            if run is not None:
                error.fixes.append(f"miles why {run.shown}   # {WHAT_IT_TELLS}")
        if run is not None:
            _conclude(said, run, error=error)
        return error


def _code_of(ended: Ended) -> int:
    return ended.said.get("code", ExitCode.FAILED)


def _as_error(fields: dict[str, Any]) -> MilesError:
    """Of the same kind, where it is one of the house's."""
    kind = getattr(errors, fields["kind"], MilesError)
    return kind(fields["error"], why=fields["why"], fix=fields["fix"])


def _cause(ended: Ended, run: RunDir | None, *, oom_before: int | None) -> MilesError:
    """Of a death without a word."""
    if "cause" in ended.said:
        return _as_error(ended.said["cause"])
    of_run = f" of run {run.name}" if run is not None else ""
    if ended.code < 0:
        how = f"process {ended.pid} was ended by {_name_of(-ended.code)}"
    else:
        how = (
            f"process {ended.pid} ended by itself with exit code {ended.code}, without a word: "
            "code of yours or of a library called `os._exit`, or Ray did, which ends whoever has "
            "lost its raylet or its control store"
        )
    killed = None if oom_before is None else (oom_kills() or 0) - oom_before
    if killed:
        how += (
            f"; the kernel has ended {killed} process{'es'[: 2 * (killed > 1)]} of this control "
            "group meanwhile, as there was no memory left"
        )
    elif ended.code == -signal.SIGKILL and killed == 0:
        how += "; the kernel ended nothing of this control group for want of memory"
    return WorkerDied(f"the driver{of_run} died", why=how, fix=[])


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _conclude(said: Said, run: RunDir, *, error: MilesError) -> None:
    """Write down what the driver could not."""
    if "log_dir" not in said:
        return
    step = step_done(run.events())
    file = verdict_file(Path(said["log_dir"]))
    if file.exists() and '"killed"' not in file.read_text(encoding="utf-8"):
        return
    cause = error.as_dict()
    event = RunEnded(outcome="killed", step=step, seconds=_seconds_since(file.parent), error=cause)
    with suppress(OSError):  # a full disk: the terminal is told in any case
        file.write_text(json.dumps({"outcome": "killed", "step": step, "error": cause}) + "\n")
        LineFile(run.events_file).write(json.dumps(stamped(event)))
        write_why(file.parent)


def _seconds_since(log_dir: Path) -> float:
    """Since the attempt began."""
    times = [entry.stat().st_mtime for entry in log_dir.iterdir()]
    return max(time.time() - min(times), 0.0) if times else 0.0


def _wait_for_clean_up(said: Said) -> None:
    """Raises MachineError where something is left."""
    if "token" in said:
        wait_for_clean_up(
            token=said["token"],
            scratch_dirs=[Path(said["scratch_dir"])] if "scratch_dir" in said else [],
            verdict=verdict_file(Path(said["log_dir"])) if "log_dir" in said else None,
        )


def _pause(seconds: float, run: RunDir) -> None:
    """Raises Stopped where the user ends it meanwhile."""
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    try:
        if signal.sigtimedwait(wanted, seconds) is not None:
            raise Stopped(
                "stopped between two attempts",
                why="Ctrl-C or SIGTERM while the driver was to be started again",
                fix=f"miles resume {run.shown}",
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
