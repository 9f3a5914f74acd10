"""Runs the driver of `miles launch` and `miles resume` in a forked child: this small parent forks
before anything heavy is imported, forwards signals, reports the cause if the driver dies silently,
and with `--supervised` restarts it.

If both are in the foreground of a terminal, the terminal's signals reach both, and only signals
sent to this process alone are forwarded. Otherwise the child has its own process group, and all are
forwarded. SIGKILL of this process ends the driver, too."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milescli.autopsy.why import WHAT_IT_TELLS, write_why
from milescli.checkpoint.run_dir import (
    RunDir,
    resume_command,
    step_done,
    step_saved,
    verdict_file,
)
from milescli.cluster.watchdog import wait_for_clean_up
from milescli.core import errors
from milescli.core.driver_pipe import DriverReport, read_report, set_parent_pipe
from milescli.core.errors import (
    ExitCode,
    MilesError,
    NodesJoined,
    Stopped,
    WorkerDied,
)
from milescli.core.files import last_log_lines, read_regular_text
from milescli.core.silence import is_stopped_process
from milescli.platform.memory_record import oom_kills
from milescli.recipe.machine import Fault
from milescli.runtime.recovery.restarts import Restarts
from milescli.runtime.recovery.stops import BY_USER, immediate_end_error, record_end, stop_signals
from milescli.workers.guard import end_with_parent

if TYPE_CHECKING:
    from milescli.console.output import Output


NODE_ERRORS = ("NodeDied", "NodesJoined")
"""Kinds of errors after which a run always continues: `machine.on_node_loss` says how."""
RESTARTABLE = (*NODE_ERRORS, "WorkerDied", "WorkerKilled", "WaitTimeout", "MachineError")
"""Kinds of errors that may not occur in another attempt without a change by the user."""
PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Pause before the driver restarts; it doubles each time, up to the longest."""


def pause_s(restart: int) -> float:
    """Return the seconds to wait before a restart; `restart` counts from 1."""
    doublings = min(restart - 1, 10)  # a larger power would be no float one day
    return min(PAUSE_S * 2**doublings, LONGEST_PAUSE_S)


@dataclass(slots=True, kw_only=True)
class Parent:
    """Runs the drivers of one run, one after the other."""

    output: Output
    start_command: str
    """Command that starts the run, for the error if a driver died before its run was created."""
    resume: Callable[[Path], None]
    """Continues a run."""
    restart_on: Collection[str]
    """Kinds of errors after which it restarts: MENDABLE if supervised, else OTHER_NODES."""
    _run: RunDir | None = None
    _has_begun: bool = False
    """True once an attempt has started; an earlier failure means that the machine is not ready."""
    _limits: Fault = field(default_factory=Fault)
    _num_steps: int | None = None
    """Number of steps of the run; None if the driver has not reported it. Once all are saved, there
    is nothing to resume."""

    def drive(self, work: Callable[[], None]) -> int:
        """Run `work` in a driver; return the exit code of the last one, which has reported
        everything to the user. Raises WorkerDied if it died silently."""
        restarts: Restarts | None = None
        while True:
            oom_before = oom_kills()
            ended = run_in_child(work, on_hold=self._report_stopped)
            if ended is None:  # this is the driver, at its end
                return ExitCode.DONE
            error = self._error_of(ended, oom_before=oom_before)
            was_reported = error is None or "code" in ended.report
            if restarts is None:
                restarts = Restarts(limits=self._limits)
            if error is None or not self._may_restart(ended, error):
                if not was_reported and error is not None:
                    raise error
                return _code_of(ended)
            run = self._run
            assert run is not None, "there is nothing to continue from"
            if isinstance(error, NodesJoined):
                self.output.note(f"{run.name} restarts: attempt {run.next_attempt}")
            else:
                self._pause_after(error, run, restarts, was_reported=was_reported)
            self._has_begun, work = True, partial(self.resume, run.path)

    def _pause_after(
        self, error: MilesError, run: RunDir, restarts: Restarts, *, was_reported: bool
    ) -> None:
        """Pause before a restart. Raises the error if no restart is left."""
        step = step_done(run.events())
        if refusal := restarts.refusal(f"{type(error).__name__}: {error.what}", step):
            raise type(error)(error.what, why=f"{error.why}\n{refusal}", fix=error.fixes)
        if not was_reported:
            self.output.error(error)
        seconds = pause_s(restarts.total)
        self.output.warn(
            f"{run.name} restarts from its newest checkpoint in {seconds:.0f} s: attempt "
            f"{run.next_attempt}, restart {restarts.total} of at most "
            f"{self._limits.max_restarts} within {self._limits.window_s:g} s"
        )
        _pause(seconds, run)

    def _report_stopped(self, driver: int) -> None:
        self.output.warn(
            f"the driver (process {driver}) was stopped by SIGSTOP, and the run waits for it: "
            f"`kill -CONT {driver}` continues it; Ctrl-C saves and ends it as usual"
        )

    def _may_restart(self, ended: Ended, error: MilesError) -> bool:
        return (
            self._run is not None
            and self._run.is_run
            and (self._num_steps is None or step_saved(self._run.events()) != self._num_steps)
            and ended.stopped_by is None
            and type(error).__name__ in self.restart_on
            and (self._has_begun or "log_dir" in ended.report)
        )

    def _error_of(self, ended: Ended, *, oom_before: int | None) -> MilesError | None:
        """Return the error that ended the driver, whether or not the user has seen it; None if it
        finished, or the user ended it."""
        report = ended.report
        if "max_restarts" in report:
            self._limits = Fault(max_restarts=report["max_restarts"], window_s=report["window_s"])
            self._num_steps = report.get("num_steps")
        if "run" in report:
            self._run = RunDir(Path(report["run"]))
        if "code" in report:
            return _as_error(report["error"]) if report["code"] and "error" in report else None
        self.output.show_cursor()
        _wait_for_clean_up(report)
        run = self._run if self._run is not None and self._run.is_run else None
        go_on = self.start_command
        if run is not None:
            saved = step_saved(run.events())
            go_on = resume_command(run.shown, step=saved, num_steps=self._num_steps)
        if ended.stopped_by in stop_signals():
            error = immediate_end_error(ended.stopped_by, fix=go_on, is_second="log_dir" in report)
        else:
            error = _cause(ended, run, oom_before=oom_before)
            error.fixes.insert(0, go_on)
            if run is not None:
                error.fixes.append(f"miles why {run.typed}   # {WHAT_IT_TELLS}")
        if report.get("ray_log"):
            Path(report["ray_log"]).unlink(missing_ok=True)
        if run is not None:
            _conclude(report, run, error=error)
        return error


def _code_of(ended: Ended) -> int:
    return ended.report.get("code", ExitCode.FAILED)


def _as_error(fields: dict[str, Any]) -> MilesError:
    """Return an error of the same class, if it is one of ours."""
    kind = getattr(errors, fields["kind"], MilesError)
    return kind(fields["error"], why=fields["why"], fix=fields["fix"])


def _cause(ended: Ended, run: RunDir | None, *, oom_before: int | None) -> MilesError:
    """Return an error that names the cause of a silent death."""
    if "cause" in ended.report:
        return _as_error(ended.report["cause"])
    of_run = f" of run {run.name}" if run is not None else ""
    if ended.code < 0:
        how = f"process {ended.pid} was ended by {_name_of(-ended.code)}"
    else:
        how = (
            f"process {ended.pid} exited with code {ended.code} without a message: your "
            "code or a library called `os._exit`, or Ray did, which ends every process that has "
            "lost its raylet or its control store"
        )
    killed = None if oom_before is None else (oom_kills() or 0) - oom_before
    if killed:
        how += (
            f"; the kernel has ended {killed} process{'es'[: 2 * (killed > 1)]} of this control "
            "group meanwhile, because there was no memory left"
        )
    elif ended.code == -signal.SIGKILL and killed == 0:
        how += "; the kernel killed nothing in this control group for lack of memory"
    if ended.report.get("ray_log"):
        log = Path(ended.report["ray_log"])
        how += f"; it was starting Ray, which printed:\n{last_log_lines(log, 3)}"
    return WorkerDied(f"the driver{of_run} died", why=how, fix=[])


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _conclude(report: DriverReport, run: RunDir, *, error: MilesError) -> None:
    """Write the verdict that the driver could not write. If it died before its attempt began, there
    is one only if the user stopped it."""
    by_user = isinstance(error, BY_USER)
    if "log_dir" in report:
        log_dir = Path(report["log_dir"])
    elif by_user:
        log_dir = run.new_attempt()
    else:
        return
    file = verdict_file(log_dir)
    if file.exists() and '"killed"' not in read_regular_text(file):
        return
    outcome = "stopped" if by_user else "killed"
    record_end(run, log_dir, error, outcome=outcome, seconds=_seconds_since(log_dir))
    write_why(log_dir)


def _seconds_since(log_dir: Path) -> float:
    """Return the seconds since the attempt began."""
    times = [entry.stat().st_mtime for entry in log_dir.iterdir()]
    return max(time.time() - min(times), 0.0) if times else 0.0


def _wait_for_clean_up(report: DriverReport) -> None:
    """Wait until the driver's processes are gone. Raises MachineError if something is left."""
    if "token" in report:
        wait_for_clean_up(
            token=report["token"],
            scratch_dirs=[Path(report["scratch_dir"])] if "scratch_dir" in report else [],
            verdict=verdict_file(Path(report["log_dir"])) if "log_dir" in report else None,
        )


def _pause(seconds: float, run: RunDir) -> None:
    """Wait. Raises Stopped if the user ends the run in the meantime."""
    wanted = stop_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    try:
        if signal.sigtimedwait(wanted, seconds) is not None:
            error = Stopped(
                "stopped between two attempts",
                why="Ctrl-C, SIGTERM or SIGHUP arrived before the driver restarted",
                fix=f"miles resume {run.typed}",
            )
            record_end(run, run.new_attempt(), error, outcome="stopped", seconds=0.0)
            raise error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_FROM_TERMINAL = 0x80
"""SI_KERNEL: the code of a signal that the terminal sent to its whole foreground."""
_SHARED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Forwarded in any case."""
_OWN_GROUP = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
"""Forwarded to a child with its own process group."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals with which a user, or a scheduler, ends a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Describes how a driver ended."""

    pid: int
    report: DriverReport
    """What the driver itself reported."""
    code: int
    """Exit code of the process; -N: killed by signal N."""
    stopped_by: int | None
    """First signal by which the user asked for the end; None if there was none."""


def run_in_child(work: Callable[[], None], *, on_hold: Callable[[int], None]) -> Ended | None:
    """Fork; return how the child ended. In the child: call `work`, raise what it raises, and return
    None, so that it continues like a process without this parent. Call it on the main thread of a
    process without other threads. `on_hold` receives the process id of a child that SIGSTOP
    stopped."""
    sys.stdout.flush()
    sys.stderr.flush()
    in_foreground = _is_foreground()
    passed_on = {*_SHARED, *(() if in_foreground else _OWN_GROUP)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*passed_on, signal.SIGCHLD})
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # nobody reads before the end: what does not fit is not said
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_driver(pipe=writing, parent=parent, own_group=not in_foreground, mask=before)
        work()
        return None
    os.close(writing)
    if not in_foreground:
        with suppress(OSError):  # it has done so itself, or ended
            os.setpgid(child, child)
    try:
        code, stopped_by = _wait(child, passed_on, in_foreground=in_foreground, on_hold=on_hold)
        return Ended(pid=child, report=read_report(reading), code=code, stopped_by=stopped_by)
    finally:
        os.close(reading)
        # what still came for the child is not for this process
        while signal.sigtimedwait([*passed_on, signal.SIGCHLD], 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_foreground() -> bool:
    for stream in (0, 1, 2):
        with suppress(OSError):
            return os.tcgetpgrp(stream) == os.getpgrp()
    return False


def _be_driver(*, pipe: int, parent: int, own_group: bool, mask: set[signal.Signals]) -> None:
    end_with_parent(parent)
    if own_group:
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    set_parent_pipe(pipe)


def _wait(
    child: int,
    passed_on: set[signal.Signals],
    *,
    in_foreground: bool,
    on_hold: Callable[[int], None],
) -> tuple[int, int | None]:
    """Return (exit code, first signal that asked for the end)."""
    stopped_by: int | None = None
    while True:
        received = signal.sigwaitinfo({*passed_on, signal.SIGCHLD})
        number = signal.Signals(received.si_signo)
        if number == signal.SIGCHLD:
            for status in _changes(child):
                if not os.WIFSTOPPED(status):
                    return os.waitstatus_to_exitcode(status), stopped_by
                if os.WSTOPSIG(status) == signal.SIGSTOP:
                    on_hold(child)
            continue
        if number in STOPS and stopped_by is None:
            stopped_by = number
        # a terminal that closes tells the leader of its session alone, which may be this process
        if not in_foreground or number == signal.SIGHUP or received.si_code != _FROM_TERMINAL:
            with suppress(ProcessLookupError):
                if number in (signal.SIGTSTP, signal.SIGCONT):
                    os.killpg(child, number)
                else:
                    os.kill(child, number)
        if number in STOPS and is_stopped_process(child):  # else it would never hear it
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGCONT)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)


def _changes(child: int) -> Iterator[int]:
    """Yield the child's wait statuses since the last call: stopped, or ended. Orphans are reaped
    too: in a container, this process may inherit them."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == child:
                yield status
            elif pid == 0:
                return
