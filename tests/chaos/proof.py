"""Proof that a change of the code changes no run: the quickstarts, recorded by one checkout and
compared with those of another, bit for bit.

    python -m tests.chaos.proof record FOLDER               # some 15 minutes on two cores
    python -m tests.chaos.proof compare FOLDER OTHER

Each is stopped and resumed once; `healed` loses its trainer rank on the way. Figures, samples and
weights with the optimizer's state are compared, seconds and the last bits of engines' log-probs are
not."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.oracle import compared, events_of
from tests.end_to_end.runs import MILES, actor_of

STEPS = 4
SHORT = ("checkpoint.every=2", "eval.num_prompts=16", "run.trackers=[]", "machine.cpu_threads=1")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo": ("quickstart", ("warmup.steps=8",)),
    "healed": ("quickstart", ("warmup.steps=8",)),
    "async": ("quickstart", ("warmup.steps=8", "rollout.max_staleness=1")),
    "moe": ("quickstart-moe", ("warmup.steps=8",)),
    "ppo": ("quickstart-ppo", ("warmup.steps=8",)),
    "tools": ("quickstart-tools", ("warmup.steps=8",)),
    "sft": ("quickstart-sft", ()),
    "dpo": ("quickstart-dpo", ()),
}
"""Name -> recipe, and what is set."""


def record(folder: Path) -> None:
    """Make all runs below `folder`. Raises CalledProcessError where one fails."""
    folder.mkdir(parents=True)
    for name, (recipe, sets) in RUNS.items():
        words = [word for pair in (*SHORT, *sets) for word in ("--set", pair)]
        launch = ["launch", "--recipe", recipe, "--name", name, "--steps", str(STEPS // 2), *words]
        _miles(folder, *launch)
        _miles(folder, "resume", name, "--steps", str(STEPS), kills=name == "healed")
        print(f"{name}: recorded", flush=True)


def _miles(folder: Path, *arguments: str, kills: bool = False) -> None:
    """Call `miles`; with `kills`, end its trainer rank once it has taken a step."""
    run = folder / "runs" / arguments[1]
    before = len(events_of(run)) if kills else 0
    with (folder / "output.log").open("a") as log:
        process = subprocess.Popen([str(MILES), *arguments], cwd=folder, stdout=log, stderr=log)
        while kills and process.poll() is None:
            if any(event["event"] == "StepDone" for event in events_of(run)[before:]):
                actor_of(process.pid, "trainer-rank-0.log").kill()
                break
            time.sleep(0.05)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, arguments)


def compare(first: Path, second: Path) -> int:
    """Say what differs; the number of runs that do."""
    wrong = {name: compared(second / "runs" / name, first / "runs" / name) for name in RUNS}
    for name, differences in wrong.items():
        print(f"{name}: {'; '.join(differences) or 'equal'}")
    return sum(map(bool, wrong.values()))


def main() -> int:
    """Returns how many runs differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("folder", type=Path)
    both = commands.add_parser("compare")
    both.add_argument("folder", type=Path)
    both.add_argument("other", type=Path)
    asked = parser.parse_args()
    if asked.command == "record":
        record(asked.folder)
        return 0
    return compare(asked.folder, asked.other)


if __name__ == "__main__":
    sys.exit(main())
