"""The watchdog of one run: a small process that outlives the driver and leaves nothing of ours
behind. Standard library only. Started by runtime.session, by `NodeAgent` and by doctor's trials.

It holds the reading end of a pipe. While the driver lives, the pipe stays open; when the driver
ends, in whatever way, the pipe closes, and every process that carries this run's token in its
environment is ended, by its id. Run as `python -m`.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from milescli.core.errors import MachineError
from milescli.core.private import without_secrets
from milescli.core.run_processes import TOKEN_VARIABLE, processes_of, state_of
from milescli.core.silence import is_stopped_process
from milescli.platform.memory_record import MemoryRecord, recorded_pids
from milescli.platform.ports import free_ports

LIST_INTERVAL_S = 2.0
"""Seconds between two lists of the run's processes: a killed one can no longer be asked what it
left behind."""
TERM_GRACE_S, KILL_GRACE_S = 3.0, 10.0
"""Seconds between TERM and KILL; then until the watchdog gives up on processes that survive
KILL."""
REPORT_TIMEOUT_S = 60.0
"""Time for the report of `miles why` on a killed driver."""
CHECK_INTERVAL_S = 0.5
"""Seconds between two checks, by the process that started it, that the watchdog lives."""
WATCHED_VARIABLE = "MILES_WATCHED_TOKEN"
"""Variable through which the watchdog learns the token: with the usual one, the watchdog would end
itself."""


class Watchdog:
    """Controls a watchdog from the process that started it. A thread checks it, and replaces it if
    it dies or is suspended."""

    def __init__(self, *, token: str, scratch_dirs: list[Path]) -> None:
        """Start it as `start_watchdog` does."""
        self._token, self._scratch_dirs = token, scratch_dirs
        self._environment = {**without_secrets(os.environ), WATCHED_VARIABLE: token}
        self._environment.pop(TOKEN_VARIABLE, None)
        self._verdicts = list[Path]()
        self.num_replaced = 0
        """Number of replacements that had to be started."""
        self._lock, self._released = threading.Lock(), threading.Event()
        self._pid = self._pipe = self._done = -1
        self._start()
        threading.Thread(target=self._keep_alive, name="watchdog", daemon=True).start()

    def write_verdict_to(self, file: Path) -> None:
        """Set the file that the driver writes when it ends in order. If it is missing then, the
        watchdog writes to it that the driver was killed."""
        with self._lock:
            self._verdicts.append(file)
            self._send_verdict(file)

    def release(self, *, timeout_s: float = TERM_GRACE_S + KILL_GRACE_S + 5.0) -> None:
        """Request the clean-up and wait for it. The driver calls this at its own end. Idempotent.
        Raises TimeoutError."""
        with self._lock:
            if self._released.is_set():
                return
            self._released.set()
            has_ended = self._finish(timeout_s)
            if has_ended and self._is_abandoned():  # it was killed as it was asked
                self._start()
                has_ended = self._finish(timeout_s)
            if not has_ended:
                raise TimeoutError(
                    f"the watchdog did not finish cleaning up within {timeout_s:.0f} s"
                )

    def _finish(self, timeout_s: float) -> bool:
        self._replace_if_gone()
        os.close(self._pipe)
        deadline = time.monotonic() + timeout_s
        while not (has_ended := _is_readable(self._done, CHECK_INTERVAL_S)):
            if time.monotonic() > deadline:
                break
            _end_if_suspended(self._pid)
        os.close(self._done)
        return has_ended

    def _is_abandoned(self) -> bool:
        folders = any(folder.exists() for folder in self._scratch_dirs)
        return folders or any(processes_of(self._token))

    def _keep_alive(self) -> None:
        was_suspended = False
        while not self._released.wait(CHECK_INTERVAL_S):
            with self._lock:
                is_suspended = _is_suspended(self._pid)
                if not self._released.is_set() and (not is_suspended or was_suspended):
                    self._replace_if_gone()
                was_suspended = is_suspended

    def _replace_if_gone(self) -> None:
        if _end_if_suspended(self._pid):
            _is_readable(self._done, KILL_GRACE_S)
        if _is_readable(self._done, 0.0):
            os.close(self._pipe)
            os.close(self._done)
            self._start()
            self.num_replaced += 1

    def _start(self) -> None:
        reading, self._pipe = os.pipe()
        self._done, ended = os.pipe()
        command = [sys.executable, "-m", "milescli.cluster.watchdog", "--pipe", str(reading)]
        command += ["--driver", str(os.getpid())]
        for folder in self._scratch_dirs:
            command += ["--remove", str(folder)]
        # The shell ends at once, and the watchdog is nobody's child: Ray kills the children of an
        # actor with it.
        started = subprocess.run(
            ["/bin/sh", "-c", '"$@" >/dev/null & echo $!', "sh", *command],
            pass_fds=[reading, ended],
            env=self._environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        os.close(reading)
        os.close(ended)
        self._pid = int(started.stdout)
        for verdict in self._verdicts:
            self._send_verdict(verdict)

    def _send_verdict(self, verdict: Path) -> None:
        with suppress(BrokenPipeError):  # it has died: the next one is told
            os.write(self._pipe, os.fsencode(verdict) + b"\0")


def _is_readable(pipe: int, within_s: float) -> bool:
    """Return True if there is data, or if the other end was closed. Unlike `select`, works for any
    descriptor number."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * within_s))


def start_watchdog(*, token: str, scratch_dirs: list[Path]) -> Watchdog:
    """Start the watchdog of this process. It removes `scratch_dirs` at the end."""
    return Watchdog(token=token, scratch_dirs=scratch_dirs)


def is_watching(pid: int) -> bool:
    """Return True if this process is a watchdog that is alive and not suspended."""
    return _is_watchdog(pid) and not is_stopped_process(pid)


def _is_suspended(pid: int) -> bool:
    return _is_watchdog(pid) and is_stopped_process(pid)


def _is_watchdog(pid: int) -> bool:
    """Return True if the process is a watchdog: the id of a dead one may be another process's by
    now."""
    with suppress(OSError):
        return b"milescli.cluster.watchdog" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _end_if_suspended(pid: int) -> bool:
    if is_suspended := _is_suspended(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return is_suspended


def clean_up_without_watchdog(
    *, token: str, scratch_dirs: list[Path], verdict: Path | None
) -> None:
    """Do what the watchdog of a dead driver would have done, if it also died or is suspended.
    Raises TimeoutError."""
    for watchdog in processes_of(token, variable=WATCHED_VARIABLE):
        _end_if_suspended(watchdog)
    instead = start_watchdog(token=token, scratch_dirs=scratch_dirs)
    if verdict is not None:
        instead.write_verdict_to(verdict)
    instead.release()


def stop_all(token: str, *, seen: set[int]) -> None:
    """Send TERM, wait, then KILL, to every process of the run. `seen` are the ids of processes that
    ended before, whose leftovers are cleaned."""
    stopped = set(processes_of(token))
    _signal(stopped, signal.SIGTERM)
    _wait_until_gone(token, TERM_GRACE_S)
    deadline = time.monotonic() + KILL_GRACE_S
    while (left := set(processes_of(token))) and time.monotonic() < deadline:
        stopped |= left
        _signal(left, signal.SIGKILL)
        time.sleep(0.1)
    _remove_shared_memory(stopped | seen)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _wait_until_gone(token: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(processes_of(token)):
        time.sleep(0.1)


def _remove_shared_memory(
    pids: set[int], *, named: tuple[str, ...] = ("torch", "psm", "miles", "sgl")
) -> None:
    """Remove files in /dev/shm that torch, Python, SGLang and our weight channel name by process
    id."""
    for entry in Path("/dev/shm").glob("*"):
        parts = entry.name.replace("-", "_").split("_")
        if parts[0] in named and any(part.isdigit() and int(part) in pids for part in parts):
            with suppress(OSError):  # gone meanwhile, or another user's
                entry.unlink()


def main() -> None:
    """Wait for the pipe to close, then clean up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--driver", type=int)
    parser.add_argument("--remove", type=Path, action="append", default=[])
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    token, seen, received = os.environ[WATCHED_VARIABLE], set[int](), b""
    there = set[int]()
    memory = MemoryRecord(driver=options.driver)
    while True:
        if not select.select([options.pipe], [], [], LIST_INTERVAL_S)[0]:
            before, there = there, set(processes_of(token))
            if ended := {pid for pid in before - there if state_of(pid) in (None, "Z")}:
                # of ranks of trainer and engines: the run goes on
                _remove_shared_memory(ended, named=("miles", "sgl"))
            seen.update(there)
            memory.sample(there)
        elif more := os.read(options.pipe, 65536):
            received += more
            memory.folder = next((v.parent for v in reversed(_verdicts(received))), None)
            if memory.folder is not None:  # what a watchdog before this one has seen
                seen |= recorded_pids(memory.folder) - {options.driver}
        else:
            break
    stop_all(token, seen=seen)
    memory.end()
    for folder in options.remove:
        shutil.rmtree(folder, ignore_errors=True)
    for verdict in _verdicts(received):
        if not verdict.exists() and verdict.parent.is_dir():
            _write_killed(verdict)
            _report(verdict.parent)


def _verdicts(received: bytes) -> list[Path]:
    return [Path(os.fsdecode(name)) for name in received.split(b"\0")[:-1]]


def _write_killed(verdict: Path) -> None:
    """Write it at once: the driver's parent, which waits for it, adds what it knows."""
    part = verdict.with_suffix(".part")
    part.write_text(
        '{"outcome": "killed", "why": "the driver process was killed (no chance to save)"}\n'
    )
    part.replace(verdict)


def _report(log_dir: Path) -> None:
    """Write the report in a separate process: it imports more than a watchdog may."""
    command = [sys.executable, "-m", "milescli.autopsy.why", str(log_dir)]
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=REPORT_TIMEOUT_S,
            check=False,
        )


if __name__ == "__main__":
    main()


CLEAN_UP_S = TERM_GRACE_S + KILL_GRACE_S + 5.0
"""Time for the watchdog to end what a dead driver left."""


def has_watchdog(token: str) -> bool:
    """Return True if a running watchdog watches the processes with this token."""
    return any(map(is_watching, processes_of(token, variable=WATCHED_VARIABLE)))


def wait_for_clean_up(
    *, token: str, scratch_dirs: Sequence[Path] = (), verdict: Path | None = None
) -> None:
    """Wait until no process with the token and none of the folders is left, and the verdict exists.
    Raises MachineError if processes are left."""
    deadline = time.monotonic() + CLEAN_UP_S
    while time.monotonic() < deadline:
        is_left = any(processes_of(token)) or any(folder.exists() for folder in scratch_dirs)
        if not is_left and (verdict is None or verdict.exists()):
            return
        if not has_watchdog(token):
            with suppress(TimeoutError):  # what is left is told below
                clean_up_without_watchdog(
                    token=token, scratch_dirs=[*scratch_dirs], verdict=verdict
                )
            break
        time.sleep(0.1)
    if left := list(processes_of(token)):
        raise MachineError(
            "the driver died, but processes of its run are still running",
            why=f"its watchdog should have ended them within {CLEAN_UP_S:.0f} s; still running: "
            f"{', '.join(map(str, left))}",
            fix=f"kill -9 {' '.join(map(str, left))}",
        )


NODE_AGENT = "milescli.cluster.watchdog:NodeAgent"


class NodeAgent:
    """Runs a watchdog, owns a folder for temporary files, and reserves ports on a node. Its actor
    does not carry the run's token, so the watchdog, whose pipe it holds, does not end it with the
    others. Ray ends it when the driver ends for any reason; then the pipe closes."""

    def __init__(self, *, token: str, temp_dir: str) -> None:
        """Create `temp_dir`, the TMPDIR of the run's processes; the watchdog removes it with its
        parent folder."""
        folder = Path(temp_dir)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(exist_ok=True)
        self._watchdog = start_watchdog(token=token, scratch_dirs=[folder.parent])

    def free_ports(self, count: int, host: str) -> list[int]:
        """Return free ports of this node."""
        return free_ports(count, host=host)

    def release(self) -> None:
        """Request the clean-up of this node and wait for it."""
        self._watchdog.release()
