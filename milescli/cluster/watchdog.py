"""The watchdog of one run: a small process that outlives the driver and leaves nothing of ours
behind. Standard library only. Started by runtime.session, by `agent` and by doctor's trials.

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
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from milescli.core.run_processes import TOKEN_VARIABLE, processes_of
from milescli.core.secret_names import without_secrets
from milescli.platform.memory_record import MemoryRecord

LOOK_EVERY_S = 2.0
"""How often it notes which processes the run has: one that is killed can no longer be asked what
it left behind."""
TERM_GRACE_S, KILL_GRACE_S = 3.0, 10.0
"""Between TERM and KILL; then until the watchdog gives up on processes that even KILL does not
end."""
REPORT_WITHIN_S = 60.0
"""For the report of `miles why` on a driver that was killed."""
WATCHED_VARIABLE = "MILES_WATCHED_TOKEN"
"""How the watchdog learns the token: under its own name, the watchdog would end itself."""


@dataclass(slots=True)
class Watchdog:
    """What the process that started a watchdog holds of it."""

    pipe: int
    """Writing end; closing it tells the watchdog to clean up and end."""
    done: int
    """Reading end; it closes when the watchdog has ended."""

    def write_verdict_to(self, file: Path) -> None:
        """From now on: a file that the driver writes when it ends in order. Where it is missing
        then, the watchdog writes there that the driver was killed."""
        os.write(self.pipe, os.fsencode(file) + b"\0")

    def release(self, *, timeout_s: float = TERM_GRACE_S + KILL_GRACE_S + 5.0) -> None:
        """Ask for the clean-up and wait for it. Called by the driver at its own end. Idempotent.
        Raises TimeoutError."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
            ended = select.select([self.done], [], [], timeout_s)[0]
            os.close(self.done)
            if not ended:
                raise TimeoutError(
                    f"the watchdog has not ended {timeout_s:.0f} s after it was asked to clean up"
                )


def start_watchdog(*, token: str, scratch_dirs: list[Path]) -> Watchdog:
    """Start the watchdog of this process. `scratch_dirs` are removed at the end."""
    reading, writing = os.pipe()
    done, ended = os.pipe()
    command = [
        sys.executable,
        "-m",
        "milescli.cluster.watchdog",
        "--pipe",
        str(reading),
        "--driver",
        str(os.getpid()),
    ]
    for folder in scratch_dirs:
        command += ["--remove", str(folder)]
    environment = {**without_secrets(os.environ), WATCHED_VARIABLE: token}
    environment.pop(TOKEN_VARIABLE, None)
    # The shell ends at once, and the watchdog is nobody's child: Ray kills the children of an actor
    # with it.
    subprocess.run(
        ["/bin/sh", "-c", '"$@" &', "sh", *command],
        pass_fds=[reading, ended],
        env=environment,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    os.close(reading)
    os.close(ended)
    return Watchdog(pipe=writing, done=done)


def stop_all(token: str, *, seen: set[int]) -> None:
    """TERM, a grace, then KILL, to every process of the run. `seen`: ids of those that ended
    before, for what they left."""
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


def _remove_shared_memory(pids: set[int]) -> None:
    """Files that torch and Python name by process id in /dev/shm."""
    for entry in Path("/dev/shm").glob("*"):
        parts = entry.name.replace("-", "_").split("_")
        if parts[0] in ("torch", "psm", "miles") and any(
            part.isdigit() and int(part) in pids for part in parts
        ):
            entry.unlink(missing_ok=True)


def main() -> None:
    """Wait for the pipe to close, then clean up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--driver", type=int)
    parser.add_argument("--remove", type=Path, action="append", default=[])
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    token, seen, said = os.environ[WATCHED_VARIABLE], set[int](), b""
    memory = MemoryRecord(driver=options.driver)
    while True:
        if not select.select([options.pipe], [], [], LOOK_EVERY_S)[0]:
            there = set(processes_of(token))
            seen.update(there)
            memory.look(there)
        elif more := os.read(options.pipe, 65536):
            said += more
            memory.folder = next((v.parent for v in reversed(_verdicts(said))), None)
        else:
            break
    stop_all(token, seen=seen)
    memory.end()
    for folder in options.remove:
        shutil.rmtree(folder, ignore_errors=True)
    for verdict in _verdicts(said):
        if not verdict.exists() and verdict.parent.is_dir():
            verdict.write_text(
                '{"outcome": "killed", "why": "the driver process was killed (no chance to '
                'save)"}\n'
            )
            _report(verdict.parent)


def _verdicts(said: bytes) -> list[Path]:
    return [Path(os.fsdecode(name)) for name in said.split(b"\0")[:-1]]


def _report(log_dir: Path) -> None:
    """In a process of its own: it imports more than a watchdog may."""
    command = [sys.executable, "-m", "milescli.autopsy.write", str(log_dir)]
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=REPORT_WITHIN_S,
            check=False,
        )


if __name__ == "__main__":
    main()
