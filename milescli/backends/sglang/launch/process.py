"""Manages a child process: own process group, output in a file, bounded waits. Independent of
engines; used by `server.py`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from milescli.core.errors import WaitTimeout, WorkerDied, WorkerKilled
from milescli.core.files import last_log_lines
from milescli.core.run_processes import TOKEN_VARIABLE, cpu_seconds, processes_of
from milescli.core.silence import is_stopped_process
from milescli.core.units import format_duration

POLL_S = 0.1
"""Seconds between two checks whether a process is ready."""
END_TIMEOUT_S = 30.0
"""Time for processes to end after SIGKILL, which takes longer than a moment on a busy machine; a
device driver may delay it further."""
TEMP_PREFIX = "miles-process-"
"""Prefix of each process's own folder for temporary files (sockets, maps); short, because socket
paths have at most 107 bytes."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs of our own servers, bypassing any proxy in the environment."""


def status(url: str, *, timeout_s: float, headers: dict[str, str] | None = None) -> int:
    """Return the status of a GET. Raises OSError if there is no answer."""
    try:
        with DIRECT.open(
            urllib.request.Request(url, headers=headers or {}), timeout=timeout_s
        ) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except HTTPException as error:  # it ended in the middle of its response
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


class Child(Protocol):
    """Declares the methods used of a started process: `subprocess.Popen`, or one like it."""

    pid: int
    """Also the id of its process group."""

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""

    def wait(self, timeout: float) -> int:
        """Wait for and return the exit code. Raises subprocess.TimeoutExpired."""

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLook:
    """Holds the state of a process and of those that it needs."""

    ended: str | None = None
    """How one of them ended; None if all run."""
    stopped: str | None = None
    """Which of them the system suspends, and why."""
    cpu_s: float = 0.0
    """Processor time so far of those that compute."""


class ManagedProcess:
    """Starts one command, watches it, and stops it with everything that it started."""

    stop_signal = signal.SIGTERM
    """Signal that orders the process to end properly."""

    def __init__(
        self, *, name: str, command: list[str], env: dict[str, str], log_path: Path, url: str
    ) -> None:
        """Prepare to run `command` in `env`, its whole environment. `name` is used in errors; `url`
        answers GET /health with 200 when the process is ready."""
        self.name = name
        self.command = command
        self.env = env
        self.log_path = log_path
        self.url = url
        self._temp_dir: Path | None = None
        self._process: Child | None = None
        self._started_at = 0.0
        self._log_begins = 0
        """Byte of the log at which this process's output begins."""

    @property
    def pid(self) -> int | None:
        """Return the process id, which is also that of its process group; None before `start`."""
        return self._process.pid if self._process else None

    def group(self) -> int | None:
        """Return the id of its process group; None before `start`."""
        return self.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.poll()

    def ended(self) -> str | None:
        """Describe how it ended; None while it runs."""
        code = self.poll()
        if code is None:
            return None
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"its process ended {how}"

    def look(self) -> ProcessLook:
        """Return the current state according to the system."""
        cpu_s = sum(map(cpu_seconds, self._computing_pids()))
        return ProcessLook(ended=self.ended(), stopped=self._stopped(), cpu_s=cpu_s)

    def _computing_pids(self) -> list[int]:
        """Return the ids of the processes that do its work."""
        return [self.pid] if self.pid is not None else []

    def _stopped(self) -> str | None:
        assert self._process is not None, f"{self.name} was not started"
        is_stopped = is_stopped_process(self._process.pid)
        return f"its process {self._process.pid} is stopped (SIGSTOP)" if is_stopped else None

    def start(self) -> None:
        """Start it in its own session, so that Ctrl-C in the terminal reaches only us. Return at
        once. Unblocks SIGINT, which a Ray actor blocks and a child would inherit, so that the
        process can be ended by it."""
        assert self._process is None, f"{self.name} was started already"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_begins = self.log_path.stat().st_size if self.log_path.exists() else 0
        self._temp_dir = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX))
        env = self.env | {"TMPDIR": str(self._temp_dir)}
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.stop_signal})
        try:
            self._process = self._spawn(env)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._started_at = time.monotonic()

    def _spawn(self, env: dict[str, str]) -> Child:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                self.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float, *, sleep: Callable[[float], None] = time.sleep) -> float:
        """Wait until it answers; return the seconds since its start. Raises WorkerDied as soon as
        it has ended (WorkerKilled if it was not at fault), WaitTimeout at the bound."""
        deadline = time.monotonic() + timeout_s
        while True:
            if (how := self._ended_in_start()) is not None:
                error = self.death(f"while it started: {how}")
                if self._was_killed():
                    error = WorkerKilled(error.what, why=error.why, fix=error.fixes)
                raise error
            if self._answers():
                return time.monotonic() - self._started_at
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"{self.name} is not ready",
                    why=f"{format_duration(timeout_s)} without 200 from "
                    f"{self.url}/health; its log ends:\n{self.last_words()}",
                    fix=[
                        f"less {self.log_path}",
                        f"--set machine.start_timeout_s={2 * timeout_s:.0f}",
                    ],
                )
            sleep(POLL_S)

    def _answers(self) -> bool:
        try:
            return status(f"{self.url}/health", timeout_s=2) == 200
        except OSError:  # not listening yet: what we wait for
            return False

    def _ended_in_start(self) -> str | None:
        """Describe how it ended before it was ready; None while it runs."""
        return self.ended()

    def _was_killed(self) -> bool:
        """Return True if a signal ended it."""
        return (self.poll() or 0) < 0

    def last_words(self) -> str:
        """Return the last lines of its log."""
        return last_log_lines(self.log_path, since=self._log_begins)

    def death(self, when: str) -> WorkerDied:
        """Return the error for its end, with its last log lines."""
        return WorkerDied(
            f"{self.name} ended {when}",
            why=f"its log ends:\n{self.last_words()}",
            fix=f"less {self.log_path}",
        )

    def stop(self, timeout_s: float = 10.0) -> None:
        """Send `stop_signal` to the leader, which ends its children, then SIGKILL to the rest of
        the group after `timeout_s`. Idempotent. Removes its temporary files."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(self.stop_signal)
        deadline = time.monotonic() + timeout_s
        while self._group_lives() and time.monotonic() < deadline:
            time.sleep(0.05)
        _signal_group(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise WaitTimeout(
                f"{self.name} does not end",
                why=f"process group {self._process.pid} received SIGKILL {END_TIMEOUT_S:g} s "
                "ago; a device driver may block it",
                fix=f"ps -o pid,stat,cmd -g {self._process.pid}",
            ) from None

        if self._temp_dir is not None:
            # it may be gone: nothing else can be done about it here
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _group_lives(self) -> bool:
        """Return True if any process of the group lives; reaps the leader, which would count as
        alive while it is a zombie."""
        assert self._process is not None
        self._process.poll()
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True


def end_group_of_run(group: int) -> None:
    """Kill a process group of this run, whose leader may have ended. Returns when the group is
    empty, or after `END_TIMEOUT_S`. Spares groups of other runs, since ids are reused."""
    token = os.environ.get(TOKEN_VARIABLE)
    deadline = time.monotonic() + END_TIMEOUT_S
    while token and time.monotonic() < deadline:
        left = [pid for pid in processes_of(token) if _group_of(pid) == group]
        if not left:
            return
        _signal_group(group, signal.SIGKILL)
        time.sleep(POLL_S)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:  # all of it has ended, which is what is wanted
        return
