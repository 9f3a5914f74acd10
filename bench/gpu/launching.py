"""Whole runs by the `miles` command, as a user starts them: recipes of the checks' own, and what a
run directory says afterwards."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from milescli.checkpoint.run_dir import RunDir, read_jsonl

HERE = Path(__file__).resolve().parent
NAMES = ("Ada", "Ben", "Chi", "Dana", "Emil", "Fay")
THINGS = ("pears", "stamps", "marbles", "tickets", "shells")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """A folder where runs are made."""

    folder: Path

    def start(self, *words: str) -> subprocess.Popen:
        """`miles WORDS`; its output goes to the check's own log."""
        path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            [sys.executable, "-m", "milescli", *words],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "COLUMNS": "120"},
            stdin=subprocess.DEVNULL,
        )

    def run(self, *words: str) -> float:
        """Seconds of the whole command, bounded by the check's limit. Raises where it fails: its
        output says why."""
        begun = time.monotonic()
        code = self.start(*words).wait()
        if code:
            self.show_logs()
            raise RuntimeError(f"`miles {' '.join(words)}` ended with exit code {code}")
        return time.monotonic() - begun

    def recipe(self, name: str, sections: dict[str, object]) -> str:
        """Written as `NAME.yaml`; returns that."""
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(sections))
        return f"{name}.yaml"

    def metrics(self, run: str, key: str) -> list[float]:
        """Of every line of metrics.jsonl that has it, in order."""
        return [line[key] for line in read_jsonl(self.of(run).metrics_file) if key in line]

    def events(self, run: str) -> list[dict]:
        """All that are there."""
        return list(self.of(run).events())

    def of(self, run: str) -> RunDir:
        """Its directory, also before it is there."""
        return RunDir(path=self.folder / "runs" / run)

    def show_logs(self) -> None:
        """The ends of the logs of all runs."""
        for log in sorted(self.folder.glob("runs/*/logs/attempt_*/*.log")):
            print(f"-- {log.relative_to(self.folder)}")
            print("\n".join(log.read_text(errors="replace").splitlines()[-40:]), flush=True)


def write_problems(path: Path, *, count: int) -> list[str]:
    """Word problems in the manner of a school book, with their answers; returns their texts."""
    source = random.Random(0)
    texts = []
    with path.open("w") as out:
        for _ in range(count):
            name, thing = source.choice(NAMES), source.choice(THINGS)
            have, boxes, each, given = (source.randint(2, 40) for _ in range(4))
            text = (
                f"{name} has {have} {thing} and buys {boxes} boxes with {each} {thing} in each. "
                f"{name} gives {given} {thing} to a friend every week for two weeks. How many "
                f"{thing} are left? Explain each step, and give the number after ####."
            )
            left = have + boxes * each - 2 * given
            out.write(json.dumps({"prompt": text, "label": str(left)}) + "\n")
            texts.append(text)
    return texts


def variety(*, prompt: str, response: str, label: str | None) -> float:
    """A reward that a model with random weights earns in part: the share of different characters.
    Recipes name it `launching:variety`."""
    return len(set(response)) / max(len(response), 1)
