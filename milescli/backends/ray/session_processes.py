"""The two processes that every session of Ray needs: its control store (GCS) and its raylet. Their
death is noticed here within a fraction of a second; Ray itself would end this process by `_exit`,
without a message, at once or after a minute. Started by `runtime.ray_session`."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from milescli.core.driver_pipe import report_to_parent
from milescli.core.errors import WorkerDied
from milescli.core.events import WorkerSilent
from milescli.core.files import last_log_lines
from milescli.core.silence import Silence, is_stopped_process

CHECK_INTERVAL_S = 0.1
NUM_LINES = 4
"""Number of the log's last lines in the error."""
END_WITHIN_S = 5.0
"""Time for an orderly end of this process after such a death; after that it kills itself by
SIGKILL, because calls to Ray may hang for a minute or for ever."""
WHO_ENDED_IT = "sudo dmesg | tail   # did the kernel end it?"
MEANING = {
    "gcs_server": "Ray's control store (GCS)",
    "raylet": "Ray's raylet",
}
"""Ray's name of a process -> ours."""


class SessionProcesses:
    """Watches these processes in one thread until it is closed."""

    def __init__(self) -> None:
        self._expected, self._over = threading.Event(), threading.Event()
        self._death: WorkerDied | None = None
        self._silences = dict[str, Silence]()
        """By Ray's names of the processes."""
        self._processes: Mapping[str, subprocess.Popen[bytes]] = {}
        self.silence_s = math.inf
        """A process that is stopped for so long is killed."""

    def watch(self, processes: Mapping[str, subprocess.Popen[bytes]], *, log_dir: Path) -> None:
        """Watch `processes` from now on: children of this process, by Ray's names. `log_dir` holds
        their logs, and vanishes with the session."""
        self._processes = dict(processes)
        if processes:
            arguments = (dict(processes), log_dir)
            threading.Thread(
                target=self._watch_processes, args=arguments, name="ray-session", daemon=True
            ).start()

    def expect_end(self) -> None:
        """Allow the processes to end from now on. Resumes a stopped one, for which Ray would wait
        for ever."""
        self._expected.set()
        for process in self._processes.values():
            if process.returncode is None and is_stopped_process(process.pid):
                os.kill(process.pid, signal.SIGKILL)

    def warnings(self, step: int) -> list[WorkerSilent]:
        """Return a warning for each process that has become silent, once. `step`: number of steps
        done."""
        silences = self._silences.values()
        return [warning for silence in silences if (warning := silence.warning(step))]

    def close(self) -> None:
        """Stop watching, after the processes have ended and Ray was left."""
        self._expected.set()
        self._over.set()

    async def check(self) -> None:
        """Raise WorkerDied if one of the processes has died."""
        await asyncio.sleep(0)
        if self._death is not None:
            raise WorkerDied(self._death.what, why=self._death.why, fix=list(self._death.fixes))

    def _watch_processes(
        self, processes: Mapping[str, subprocess.Popen[bytes]], log_dir: Path
    ) -> None:
        while not self._expected.wait(CHECK_INTERVAL_S):
            for name, process in processes.items():
                label = f"process {process.pid} ({name})"
                if (how := _ended(process)) is not None and not self._expected.is_set():
                    words = "" if how.endswith("SIGKILL") else _last_words(name, log_dir)
                    self._lost(f"{MEANING[name]} died", f"{label} {how}", words, fix=WHO_ENDED_IT)
                    return
                silence = self._silence_of(name, process)
                if silence.is_too_long:
                    # ended by `expect_end`: Ray ends this process as soon as its raylet is gone
                    what = f"{MEANING[name]} has been silent for {silence.seconds:.0f} s"
                    self._lost(
                        what,
                        f"{label} is stopped (SIGSTOP)",
                        "",
                        fix="ps -eo pid,stat,cmd | grep ray   # T: stopped; who stopped it?",
                    )
                    return

    def _silence_of(self, name: str, process: subprocess.Popen[bytes]) -> Silence:
        silence = self._silences.setdefault(
            name, Silence(worker=MEANING[name], bound_s=self.silence_s)
        )
        silence.bound_s = self.silence_s
        is_stopped = is_stopped_process(process.pid)
        silence.observe(f"its process {process.pid} is stopped (SIGSTOP)" if is_stopped else None)
        return silence

    def _lost(self, what: str, how: str, last_words: str, *, fix: str) -> None:
        self._death = WorkerDied(
            what,
            why=f"{how}; without it, Ray ends every process of the run{last_words}",
            fix=fix,
        )
        report_to_parent(cause=self._death.as_dict())
        if not self._over.wait(END_WITHIN_S):
            os.kill(os.getpid(), signal.SIGKILL)


def _last_words(name: str, log_dir: Path) -> str:
    logs = [log_dir / f"{name}.err", log_dir / f"{name}.out"]
    log = next((file for file in logs if file.exists() and file.stat().st_size), logs[-1])
    return f"; last lines of its log:\n{last_log_lines(log, NUM_LINES)}"


def of_this_session() -> dict[str, subprocess.Popen[bytes]]:
    """Return Ray's processes that this process has started; empty if it joined a cluster."""
    from ray._private import worker

    node = worker._global_node
    started = getattr(node, "all_processes", {}) if node is not None else {}
    return {name: started[name][0].process for name in MEANING if started.get(name)}


def _ended(process: subprocess.Popen[bytes]) -> str | None:
    """Return how a process ended, as a verb phrase; None while it lives. Does not reap the
    zombie."""
    with suppress(ChildProcessError):  # somebody has reaped it
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is None:
            return None
        if found.si_code == os.CLD_EXITED:
            return f"ended by itself with exit code {found.si_status}"
        return f"was ended by {signal_name(found.si_status)}"
    return _as_reaped(process.returncode)


def _as_reaped(code: int | None) -> str:
    if code is None:
        return "ended"
    return (
        f"was ended by {signal_name(-code)}"
        if code < 0
        else f"ended by itself with exit code {code}"
    )


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`, or its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
