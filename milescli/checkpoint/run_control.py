"""Stops a run from another shell, reads its logs, stores a note about it, deletes it. None of these
needs the process that started the run: the run's lock names its driver. Called by `miles stop`,
`miles logs`, `miles note` and `miles rm`, and by the page."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from milescli.checkpoint.run_dir import (
    ADAPTERS,
    LAYOUT,
    RECIPE_FILE,
    RunDir,
    is_locked,
    running_error,
)
from milescli.checkpoint.run_lock import lock
from milescli.core.errors import CheckpointError, MachineError, MilesError
from milescli.core.files import open_regular, read_regular_text

POLL_S = 0.2
"""Seconds between two checks of the lock of a stopping run, or of a log that is followed."""
RUN_MARKERS = ("manifest.json", "events.jsonl")
"""Every run directory has at least one of these, besides `recipe.yaml`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """Identifies the process that works on a run."""

    host: str
    pid: int


def driver_of(run: RunDir) -> Driver | None:
    """Return the process that works on a run; None if the run is not locked. Raises MilesError if
    the lock does not name it."""
    if not is_locked(run):
        return None
    host, _, pid = read_regular_text(run.lock_file).strip().partition(" ")
    if not pid.isdecimal():
        raise running_error(run)
    return Driver(host=host, pid=int(pid))


def stop(run: RunDir, *, timeout_s: float, at_once: bool = False) -> bool:
    """Signal a run's driver to save and stop, as Ctrl-C does, and wait until it has ended.
    `at_once`: send a second signal, so that it does not save. Return False if the run was not
    running. Raises MachineError if the driver is on another host, and MilesError if it has not
    ended after `timeout_s` seconds."""
    driver = driver_of(run)
    if driver is None:
        return False
    if driver.host != socket.gethostname():
        raise MachineError(
            f"another computer drives the run `{run.name}`",
            why=f"process {driver.pid} on {driver.host} drives it, and this computer is "
            f"{socket.gethostname()}",
            # the shell there reads the words once more
            fix=shlex.join(["ssh", driver.host, shlex.join(["miles", "stop", str(run.path)])]),
        )
    if not _has_open(driver.pid, run.lock_file):
        raise MachineError(
            f"the driver of run `{run.name}` cannot be reached from here",
            why=f"its lock names process {driver.pid}, which does not hold the lock: the driver "
            "runs in another container, or another computer shares the folder",
            fix=f"miles stop {run.typed}   # run this where you launched it",
        )
    for number in (signal.SIGTERM, signal.SIGINT)[: 1 + at_once]:
        with suppress(ProcessLookupError):  # it ended by itself
            os.kill(driver.pid, number)
    until = time.monotonic() + timeout_s
    while driver_of(run) == driver:
        if time.monotonic() > until:
            raise MilesError(
                f"run `{run.name}` has not stopped yet",
                why=f"process {driver.pid} received the request to save and stop, but is still "
                f"working after {timeout_s:g} s: it finishes its current work and then "
                "writes a checkpoint",
                fix=[
                    f"miles status {run.typed}   # what is it doing?",
                    f"miles stop {run.typed} --now   # without saving",
                ],
            )
        time.sleep(POLL_S)
    return True


def logs_of(run: RunDir, *, attempt: int | None) -> list[Path]:
    """Return the logs of an attempt, the most recently changed first. `attempt` None: the newest.
    Raises CheckpointError if there is none."""
    attempts = run.attempts()
    wanted = run.path / "logs" / f"attempt_{attempt}" if attempt else next(reversed(attempts), None)
    known = wanted.iterdir() if wanted in attempts else ()
    files = [one for one in known if one.suffix in (".log", ".txt") and one.is_file()]
    if not files:
        named = ", ".join(one.name.partition("_")[2] for one in attempts) or "none"
        raise CheckpointError(
            f"run `{run.name}` has no log" + (f" of attempt {attempt}" if attempt else " yet"),
            why=f"its attempts are {named}",
            fix=f"miles status {run.typed}",
        )
    return sorted(files, key=lambda one: (-one.stat().st_mtime, one.name))


def last_lines(file: Path, lines: int) -> tuple[str, int]:
    """Return (the last `lines` lines of a log, its size in bytes)."""
    with open_regular(file) as opened:
        end = opened.seek(0, os.SEEK_END)
        length, tail = lines * _LINE_BYTES, b""
        while lines and tail.count(b"\n") <= lines and len(tail) < end:
            length *= 2  # lines that are longer than most
            opened.seek(max(0, end - length))
            tail = opened.read(end - opened.tell())
    text = tail.decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:] if lines else []), end


def follow_lines(file: Path, end: int, run: RunDir) -> Iterator[str]:
    """Yield complete lines that are appended to a log after byte `end`, until its run has stopped;
    then also one that its process did not complete."""
    rest = b""
    while True:
        goes_on = is_locked(run)
        with open_regular(file) as opened:
            opened.seek(end)
            rest += opened.read()
            end = opened.tell()
        whole, newline, rest = rest.rpartition(b"\n")
        if newline:
            yield whole.decode(errors="replace")
        if not goes_on:
            if rest:
                yield rest.decode(errors="replace")
            return
        time.sleep(POLL_S)


def size_bytes(run: RunDir) -> int:
    """Return the disk space of a run's files in bytes; links do not count."""
    total = 0
    for folder, _, names in os.walk(run.path):
        for name in names:
            with suppress(OSError):  # deleted meanwhile
                total += os.lstat(Path(folder, name)).st_size
    return total


def require_deletable(run: RunDir) -> None:
    """Raise CheckpointError if the folder holds something that miles did not write, or is a part of
    a run; MilesError if the run is running."""
    if run.path.parent.name == ADAPTERS and RunDir(run.path.parent.parent).is_run:
        raise CheckpointError(
            f"`{run.name}` is only a part of a run",
            why="it is one of the adapters that the run trains together",
            fix=f"miles rm {RunDir(run.path.parent.parent).typed}   # deletes all of them",
        )
    if is_locked(run):
        raise running_error(run)
    others = sorted(entry.name for entry in run.path.iterdir() if not _is_miles_file(entry.name))
    why = None
    if run.path.is_symlink():
        why = f"it is a link to {run.path.resolve()}"
    elif not any((run.path / mark).is_file() for mark in RUN_MARKERS):
        why = f"it holds neither {' nor '.join(RUN_MARKERS)}: no run was started in it"
    elif others:
        named = ", ".join(f"`{name}`" for name in others[:3]) + ", ..." * (len(others) > 3)
        why = f"it also holds {named}, which no run of miles writes"
    if why is not None:
        raise CheckpointError(
            f"miles does not delete {run.shown}",
            why=why,
            fix=f"ls -la {run.typed}   # move anything that you want to keep",
        )


def _is_miles_file(name: str) -> bool:
    known = {part.partition("/")[0] for entry in LAYOUT for part in entry.split(", ")}
    return name in known or name.startswith(".") or is_model_folder(name)


def is_model_folder(name: str) -> bool:
    """Return True for the name of a folder of a run that holds a model which miles made."""
    return re.fullmatch(_MODEL, name) is not None


def delete(run: RunDir) -> None:
    """Delete a run. It is renamed first, so that an interrupted deletion never leaves half of a run
    under its name. Raises as `require_deletable`."""
    require_deletable(run)
    with lock(run):
        doomed = run.path.with_name(f".deleted-{run.path.name}-{os.getpid()}")
        run.path.rename(doomed)
        (doomed / RECIPE_FILE).unlink()  # what is left if this is interrupted is no run
        shutil.rmtree(doomed)


_LINE_BYTES = 2000
"""Bytes to read for each line that is shown."""
_MODEL = r"((score|critic|teacher-\d+)-)?model|(reward|draft|role)-model-[0-9a-f]{8}"
"""Folders of models that miles made for a run."""


def _has_open(pid: int, lock_file: Path) -> bool:
    """Return True if the process has the file open, or if this system cannot tell."""
    opened = Path(f"/proc/{pid}/fd")
    try:
        wanted = lock_file.stat()
        for link in opened.iterdir():
            with suppress(OSError):
                if os.path.samestat(link.stat(), wanted):
                    return True
    except OSError:
        return not Path("/proc/self/fd").exists()
    return False


LONGEST_NOTE = 2000
"""Most characters of a note."""
NOTE_BYTES = 4 * LONGEST_NOTE
TAG = re.compile(r"(?<!\S)#([\w./-]+)")
"""A word of a note that begins with `#` is a tag."""


def read_note(run: RunDir) -> str:
    """Return the user's note about a run; empty if nothing can be read."""
    try:
        number = os.open(run.note_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(number, "rb") as opened:
            return opened.read(NOTE_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""


def write_note(run: RunDir, text: str) -> None:
    """Replace the note of a run; an empty text removes it. Raises MilesError if it is too long."""
    text = text.strip()
    if len(text) > LONGEST_NOTE:
        raise MilesError(
            f"the note has {len(text)} characters",
            why=f"a note has at most {LONGEST_NOTE}",
            fix=f"miles note {run.typed} 'what matters most'",
        )
    if not text:
        run.note_file.unlink(missing_ok=True)
        return
    fresh = run.path / f".note-{os.getpid()}"
    fresh.write_text(f"{text}\n", encoding="utf-8", errors="replace")
    fresh.replace(run.note_file)
