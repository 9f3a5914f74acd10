"""Where trials run: a folder of its own, with the recipe, the reward, and the calm runs that others
are compared with. Starts `miles`, and notes when it said what."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos import rewards
from tests.chaos.oracle import events_of, intact_records, of_kind
from tests.chaos.victims import RunProcesses
from tests.end_to_end.runs import MILES, Workplace

SETS = (
    "train.steps=16",
    "checkpoint.every=4",
    "rollout.reward=chaos_rewards:variety",
    "machine.silence_s=5",
)
"""Of every trial, on top of the tiny recipe."""
EVERY = 4
LOOK_EVERY_S = 0.005
LONGEST_S = 300.0
"""For a run, beyond what its fault may take."""


@dataclass
class Attempt:
    """One `miles` at work, until its end."""

    process: subprocess.Popen[bytes]
    run: Path
    log: Path
    """What it says on the terminal."""
    processes: RunProcesses = field(init=False)
    events: list[tuple[float, dict]] = field(default_factory=list)
    """(when it was read, event), those of this attempt."""
    _read: int = 0
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self.processes = RunProcesses(self.process.pid)
        file = self.run / "events.jsonl"
        self._read = file.stat().st_size if file.exists() else 0

    @property
    def said(self) -> str:
        """On the terminal, so far."""
        return self.log.read_text()

    def look(self) -> list[dict]:
        """The events since the last look."""
        now = time.monotonic()
        if now - self._looked > 0.5:
            self.processes.look()
            self._looked = now
        file = self.run / "events.jsonl"
        if not file.exists() or file.stat().st_size <= self._read:
            return []
        with file.open("rb") as opened:
            opened.seek(self._read)
            data = opened.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        new = intact_records(whole.splitlines())
        self.events += [(now, event) for event in new]
        return new

    def wait_for(self, condition, *, within_s: float, what: str) -> bool:
        """Until a new event meets the condition; False where the run ends before. Raises
        TimeoutError."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if any(condition(event) for event in self.look()):
                return True
            if self.process.poll() is not None:
                return any(condition(event) for event in self.look())
            time.sleep(LOOK_EVERY_S)
        raise TimeoutError(f"{what}: not within {within_s:.0f} s")

    def end(self, *, within_s: float) -> int:
        """Wait for the exit code. Raises TimeoutError."""
        self.wait_for(lambda event: False, within_s=within_s, what="the end of the run")
        return self.process.returncode

    def pause(self, seconds: float) -> None:
        """Let it go on for so long, and note what it says."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            self.look()
            time.sleep(LOOK_EVERY_S)

    def kill(self) -> None:
        """It does not end by itself."""
        for process in (*self.processes.all(), self.processes.parent):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


class Place:
    """One folder for all trials of a session."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.variables = dict[str, str]()
        """Of the runs that are started from here on, on top of those of everybody."""
        self.before: tuple[str, ...] = ()
        """What stands before the command, e.g. one that makes a namespace for it."""
        self._workplace = Workplace(folder)
        self.wish = folder / rewards.WISH.name
        shutil.copy(Path(rewards.__file__), folder / "chaos_rewards.py")

    def run(self, name: str) -> Path:
        """The directory of a run."""
        return self._workplace.run(name)

    def left(self) -> list[str]:
        """What outlives a run, beside what its processes tell of."""
        return []

    def wipe(self, name: str) -> None:
        """Of a run nothing is left but its directory, where a disk of its own is mounted there."""
        shutil.rmtree(self.run(name), ignore_errors=True)

    def launch(self, name: str, *, sets: tuple[str, ...], options: tuple[str, ...] = ()) -> Attempt:
        """Start a run anew."""
        self.wipe(name)
        # what the fault wants stands in the place of what all have
        wanted = {text.partition("=")[0]: text for text in (*SETS, *sets)}
        pairs = [part for text in wanted.values() for part in ("--set", text)]
        return self._start(
            name, ["launch", "--recipe", "tiny.yaml", "--name", name, *options, *pairs]
        )

    def resume(self, name: str) -> Attempt:
        """Go on with a run."""
        return self._start(name, ["resume", name])

    def _start(self, name: str, arguments: list[str]) -> Attempt:
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*self._before(), str(MILES), *arguments],
                cwd=self.folder,
                env=self._environment() | self.variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return Attempt(process, self.run(name), log)

    def _before(self) -> list[str]:
        """What stands before the command."""
        return list(self.before)

    def _environment(self) -> dict[str, str]:
        environment = dict(self._workplace.environment)
        environment["PYTHONPATH"] += f":{self.folder}"
        return environment

    def calm(self, sets: tuple[str, ...]) -> Path:
        """The run of this recipe that nobody hurts; made once."""
        name = "-".join(["calm", *(text.replace(":", ".") for text in sets)])
        if not of_kind(events_of(self.run(name)), "RunEnded"):
            attempt = self.launch(name, sets=sets)
            try:
                code = attempt.end(within_s=LONGEST_S)
            except TimeoutError:
                attempt.kill()
                raise
            assert code == 0, f"the calm run ended with {code}:\n{attempt.said}"
        return self.run(name)


def usual_seconds(calm: Path) -> dict[str, float]:
    """Phase of a step -> how long it takes, in the middle; `save`: until it is complete."""
    events = events_of(calm)
    steps = [event["seconds"] for event in of_kind(events, "StepDone")]
    usual = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
    saves = [event["seconds"] for event in of_kind(events, "CheckpointSaved")]
    return usual | {"save_s": statistics.median(saves)}
