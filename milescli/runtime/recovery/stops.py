"""Ends a run that its user stops when there is nothing more to save: during preparation, during its
start, or by a second signal. Its state is then `stopped`, and `miles resume` continues it. Called
by launch, resume, train and the parent of a driver."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from milescli.checkpoint.run_dir import RunDir, resume_command, step_done, step_saved, verdict_file
from milescli.core.errors import ExitCode, Interrupted, MilesError, Stopped, Terminated
from milescli.core.events import RunEnded, stamped
from milescli.runtime.recording.side_files import LineFile

_NAMES = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP (the terminal was closed)",
    signal.SIGUSR1: "SIGUSR1 (this machine is taken away)",
}
BY_USER = (Stopped, Interrupted, Terminated)
"""Errors of a run that its user stopped: it did not fail."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals by which a user, or a scheduler, stops a run. SIGHUP is not one if it is
    ignored, as with `nohup`."""
    return [number for number in _NAMES if signal.getsignal(number) != signal.SIG_IGN]


def immediate_end_error(
    number: int | None, *, fix: str, is_second: bool = False, notice: str = ""
) -> MilesError:
    """Return the error of work that a signal ended at once. `fix`: the command that continues or
    starts again; `is_second`: the work was already being stopped and saved; `notice`: what ended it
    instead of a signal."""
    kind = Interrupted if number == signal.SIGINT else Terminated
    name = notice or _NAMES[signal.Signals(number or signal.SIGTERM)]
    why = (
        "a second time: the work since the newest checkpoint is not saved"
        if is_second
        else "when there was nothing new to save"
    )
    return kind("stopped at once", why=f"{name} {why}", fix=fix)


def stop_signal(error: BaseException) -> int | None:
    """Return the signal by which the user stopped the work, if `error` stands for one. See
    `commands.app` for SIGTERM."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    if isinstance(error, SystemExit) and error.code == ExitCode.TERMINATED:
        return next(iter(_received), signal.SIGTERM)
    return None


_received: list[int] = []
"""Signals received within `recording_stop`."""


def _stop(number: int, _: object) -> None:
    """Handle a signal. A closed terminal may send SIGHUP twice: by the shell, and the kernel."""
    again = number == signal.SIGHUP and bool(_received)
    _received.append(number)
    if not again:
        _raise(number)


def _raise(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(ExitCode.TERMINATED)


def check_stopped() -> None:
    """Raise again what a signal raised within `recording_stop`, in case a library swallowed it
    while it was being imported or called."""
    if _received:
        _raise(_received[0])


@contextmanager
def _recording_signals() -> Iterator[None]:
    old = {number: signal.signal(number, _stop) for number in stop_signals()}
    try:
        yield
    finally:
        _received.clear()
        for number, handler in old.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def recording_stop(run: RunDir, *, num_steps: int) -> Iterator[None]:
    """Let a signal that no attempt handles end the work within the context, and record the run's
    state as `stopped`. Raises Interrupted or Terminated then. `num_steps`: of the whole run. Enter
    it on the main thread."""
    before = run.attempts()
    with _recording_signals():
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as raised:
            if (number := stop_signal(raised)) is None:
                raise
            if not run.is_run:  # its directory was just made
                run.discard_if_unused()
                raise
            saved = step_saved(run.events())
            fix = resume_command(run.shown, step=saved, num_steps=num_steps)
            error = immediate_end_error(number, fix=fix)
            new_attempts = run.attempts()[len(before) :]
            log_dir = new_attempts[-1] if new_attempts else run.new_attempt()
            if not verdict_file(log_dir).exists():
                record_end(run, log_dir, error, outcome="stopped", seconds=0.0)
            raise error from raised


def record_end(
    run: RunDir, log_dir: Path, error: MilesError, *, outcome: str, seconds: float
) -> None:
    """Write the verdict and the last event of an attempt that could not do so itself."""
    step, cause = step_done(run.events()), error.as_dict()
    event = RunEnded(outcome=outcome, step=step, seconds=seconds, error=cause)
    verdict = {"outcome": outcome, "step": step, "error": cause}
    with suppress(OSError):  # a full disk: the terminal is told in any case
        verdict_file(log_dir).write_text(json.dumps(verdict) + "\n", encoding="utf-8")
        LineFile(run.events_file).write(json.dumps(stamped(event)))
