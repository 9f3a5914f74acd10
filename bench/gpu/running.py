"""One check in a process of its own, with a limit of its own: every line that it should say comes
out, as the check says it or with the reason why it did not. Nothing that it started outlives it.
Called by `visit.py`."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from checks import Check, Visit
from lines import Record, Verdict

DESCRIPTOR = "MILES_VISIT_FD"
"""Environment variable with the number of the pipe that a check's lines go to."""
GRACE_S = 10.0
"""For a check to clean up after SIGTERM."""
_PARENT_DEATH_SIGNAL, _SUBREAPER = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl(2)."""


def adopt_orphans() -> None:
    """Whoever loses its parent below this process becomes its child, not init's."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def end_by_exception() -> None:
    """SIGTERM and SIGINT, which a shell has its background jobs ignore, end this process so that
    every `finally` is run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The process of one check."""

    check: Check
    device: str
    log_path: Path
    """What it and its own processes print."""

    def records(self, budget_s: float) -> Iterator[Record]:
        """As they come; at most for `budget_s`."""
        said: set[str] = set()
        limit_s = min(self.check.limit_on(self.device), budget_s)
        started = time.monotonic()
        reading, process = self._start()
        verdict, patience_s = Verdict.FAILED, 0.0
        try:
            for text in _lines(reading, until=started + limit_s):
                record = Record.from_json(text)
                said.add(record.name)
                yield record
            patience_s = GRACE_S  # it has said all, and is about to end
        except TimeoutError:
            verdict = Verdict.TIMEOUT
        finally:
            os.close(reading)
            _end(process, patience_s=patience_s)
        seconds = round(time.monotonic() - started, 2)
        note = f"after {limit_s:.0f} s; " if verdict is Verdict.TIMEOUT else ""
        for name in self.check.lines:
            if name not in said:
                yield Record(
                    check=self.check.name,
                    name=name,
                    verdict=verdict,
                    seconds=seconds,
                    note=note + _last_word(self.log_path),
                )
        if process.returncode and said.issuperset(self.check.lines):
            said_last = f"exit code {process.returncode}; {_last_word(self.log_path)}"
            yield Record(
                check=self.check.name,
                name="its end",
                verdict=Verdict.FAILED,
                seconds=seconds,
                note=said_last,
            )

    def _start(self) -> tuple[int, subprocess.Popen]:
        reading, writing = os.pipe()
        visit = str(Path(__file__).parent / "visit.py")
        env = os.environ | {DESCRIPTOR: str(writing), "PYTHONUNBUFFERED": "1"}
        if self.device == "cpu":  # also where there is a device
            env |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        with self.log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, visit, self.check.name, "--device", self.device],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=(writing,),
                start_new_session=True,
            )
        os.close(writing)
        return reading, process


def say_lines(check: Check, device: str) -> None:
    """In the check's own process: run it, and hand over each line."""
    end_by_exception()
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)  # a killed visit too
    descriptor = int(os.environ.pop(DESCRIPTOR))
    os.set_inheritable(descriptor, False)
    with (
        os.fdopen(descriptor, "w") as out,
        tempfile.TemporaryDirectory(prefix="miles-visit-") as folder,
    ):
        visit = Visit(device=device, folder=Path(folder))  # type: ignore[arg-type]
        before = time.monotonic()
        for line in check.run(visit):
            assert line.name in check.lines, f"{check.name} does not announce `{line.name}`"
            now = time.monotonic()
            record = Record.of(
                line, check=check.name, seconds=now - before, on_device=visit.on_device
            )
            out.write(record.to_json() + "\n")
            out.flush()
            before = now


def _lines(descriptor: int, *, until: float) -> Iterator[str]:
    """Whole lines from the pipe, to its end. TimeoutError where the time passes first."""
    rest = b""
    while True:
        left = until - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise TimeoutError
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode() for line in whole)


def _end(process: subprocess.Popen, *, patience_s: float) -> None:
    """The check and all that it started, also what changed its group or lost its parent; by itself
    within `patience_s`."""
    for bound_s, order in ((patience_s, process.terminate), (GRACE_S, process.kill)):
        try:
            process.wait(bound_s)
        except subprocess.TimeoutExpired:
            order()
    process.wait()
    left = psutil.Process().children(recursive=True)
    for member in left:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=GRACE_S)


def _last_word(log_path: Path) -> str:
    """The last line of the log: the exception, as a rule."""
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"
