"""Runs one trial: the `miles launch` or `miles resume` that trains it, in a process of its own, and
reads what its run writes. If the sweep ends, the run is saved and stopped."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from milescli.checkpoint.run_control import driver_of
from milescli.checkpoint.run_dir import RunDir, read_jsonl
from milescli.core.errors import ExitCode, MilesError
from milescli.core.files import last_log_lines
from milescli.core.history import Evaluation
from milescli.core.run_processes import state_of
from milescli.insight.reader import RunReader
from milescli.sweep.folder import SweepDir, Trial, TrialState

STOP_TIMEOUT_S, NOW_TIMEOUT_S = 600.0, 60.0
"""Time limits for a trial that should save and stop, or stop at once."""
MAIN = "milescli.sweep.trial_main"
SILENT_S = 900.0
"""Seconds without an event after which a trial's process is checked."""
_SUSPENDED = ("T", "t")
_STOPPED = (ExitCode.RESUMABLE, ExitCode.INTERRUPTED, ExitCode.TERMINATED, -signal.SIGTERM)


class TrialProcess:
    """Runs a trial's process, which starts at once."""

    def __init__(
        self, folder: SweepDir, trial: Trial, words: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        """Start the process. `words`: the arguments of `miles`; `variables`: environment variables
        in addition to ours."""
        self.trial, self.run = trial, folder.run_of(trial)
        self.reader = RunReader(self.run)
        self.reader.update()
        self.judged_step = max((one.step for one in self.reader.history.evaluations), default=-1)
        """Step up to which evaluations were reported already."""
        self.wanted: TrialState | None = None
        """State of the trial after it was asked to stop."""
        self._stop_by, self._signals = math.inf, [signal.SIGTERM, signal.SIGINT, signal.SIGKILL]
        self._warned, self._began_s = set[str](), time.time()
        self.log = folder.log_file(trial)
        with open(self.log, "ab") as log:
            self._said_before = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", MAIN, str(os.getpid()), *words, "--json"],
                cwd=folder.cwd,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for the sweep, which passes it on
            )

    def new_evaluations(self) -> Iterator[Evaluation]:
        """Yield evaluations that its run has made since the last call."""
        self.reader.update()
        for one in list(self.reader.history.evaluations):
            if one.step > self.judged_step:
                self.judged_step = one.step
                yield one

    def stop(self, wanted: TrialState) -> None:
        """Ask the process to save and stop, as `miles stop` does; if called again, to stop at once,
        without saving. Does not wait."""
        self.wanted = self.wanted or wanted
        number = self._signals.pop(0) if len(self._signals) > 1 else self._signals[0]
        timeout_s = STOP_TIMEOUT_S if number == signal.SIGTERM else NOW_TIMEOUT_S
        self._stop_by = time.monotonic() + timeout_s
        with suppress(ProcessLookupError):
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)  # a suspended one hears nothing else

    def ended(self) -> TrialState | None:
        """Return the state of a trial that has ended, and set its error; None while it runs. If it
        exceeds the time limit of a stop, the next stronger signal is sent."""
        code = self._process.poll()
        if code is None:
            if time.monotonic() > self._stop_by:
                self.stop(TrialState.STOPPED)
            return None
        if code == ExitCode.DONE:
            return TrialState.DONE
        if code in _STOPPED or (self.wanted and code == -signal.SIGKILL):
            return self.wanted or TrialState.STOPPED
        self.trial.error = self._error(code)
        return TrialState.FAILED

    def _error(self, code: int) -> dict[str, Any]:
        """Return the last error of its process, or else the verdict of its run."""
        lines = read_jsonl(self.log, after=self._said_before)
        if errors := [line for line in lines if line.get("kind") == "error"]:
            return {key: errors[-1][key] for key in ("error", "why", "fix") if key in errors[-1]}
        verdict = (self.run.verdict() or {}) if self.run.path.exists() else {}
        if isinstance(error := verdict.get("error"), dict):
            return error
        return MilesError(
            f"trial {self.trial.run_name} ended with exit code {code}",
            why=f"it said nothing; the last lines of its log:\n{last_log_lines(self.log, 3)}",
            fix=f"less {self.log}",
        ).as_dict()

    def new_warnings(self) -> Iterator[str]:
        """Yield warnings about a trial that makes no progress, each once."""
        found = dict[str, str]()
        pids = [self._process.pid]
        with suppress(MilesError, OSError):
            driver = driver_of(self.run) if self.run.path.exists() else None
            pids += [driver.pid] if driver is not None else []
        name = self.trial.run_name
        if suspended := [pid for pid in pids if state_of(pid) in _SUSPENDED]:
            found["suspended"] = (
                f"{name} is suspended (SIGSTOP), and the sweep waits for it: "
                f"kill -CONT {' '.join(map(str, suspended))}"
            )
        last_s = self.reader.history.last_s
        since_s = time.time() - max(self._began_s, 0.0 if math.isnan(last_s) else last_s)
        if since_s > SILENT_S:
            found["silent"] = (
                f"{name} has written nothing for {since_s / 60:.0f} min: "
                f"miles status {self.run.typed}"
            )
        for kind in found.keys() - self._warned:
            yield found[kind]
        self._warned = set(found)


def remove_unstarted(run: RunDir) -> None:
    """Empty the folder of a run whose process was killed before it wrote a recipe. Files that miles
    did not write stay, and `miles launch` refuses the folder."""
    if run.path.is_dir() and [*run.path.iterdir()] == [run.lock_file]:
        run.lock_file.unlink()
