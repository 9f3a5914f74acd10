"""Real runs that are ill on purpose, and a few that are not: does `miles status` call them by name?

    python bench/sick.py [--only NAME,NAME] [--folder DIR]

Each is the quickstart's model after its warm-up (trained once, in DIR), with one thing wrong. What
is printed: the name that was planted, what the verdict says, and whether it has the name.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MILES = [sys.executable, "-m", "milescli"]
HEALTHY = "healthy"
REWARDS = """
import hashlib


def always(*, prompt, response, label):
    return 1.0


def noise(*, prompt, response, label):
    return hashlib.sha256(response.encode()).digest()[0] / 255
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ill:
    """One run."""

    planted: str
    """Name of the finding; healthy."""
    sets: dict[str, object] = field(default_factory=dict)
    steps: int = 24
    kills: int = 0
    """Engines that are ended while it runs."""
    from_seed: bool = False
    """Without the warm-up."""


RUNS = {
    "as it is": Ill(planted=HEALTHY),
    "a third of the rate": Ill(planted=HEALTHY, sets={"train.optimizer.lr": 1e-4}),
    "one step ahead": Ill(planted=HEALTHY, sets={"rollout.max_staleness": 1}),
    "GSPO": Ill(planted=HEALTHY, sets={"train.algorithm": "gspo"}),
    "never right": Ill(planted="groups-too-hard", from_seed=True, steps=12),
    "always right": Ill(planted="groups-too-easy", sets={"rollout.reward": "ill_rewards:always"}),
    "noise": Ill(planted="reward-flat", sets={"rollout.reward": "ill_rewards:noise"}, steps=30),
    "no rate": Ill(planted="reward-flat", sets={"train.optimizer.lr": 1e-12}, steps=30),
    "far too high a rate": Ill(
        planted="reward-falling", sets={"train.optimizer.lr": 2e-2}, steps=30
    ),
    "cut off": Ill(planted="truncation", sets={"rollout.max_response_tokens": 4}),
    "schedule over": Ill(
        planted="no-learning-rate",
        sets={"train.optimizer.schedule": "ill_rewards:over"},
    ),
    "large updates": Ill(
        planted=HEALTHY,
        sets={
            "train.updates_per_step": 4,
            "train.clip_low": 0.001,
            "train.clip_high": 0.001,
        },
    ),
    "away from the reference": Ill(
        planted="kl-runaway", sets={"train.kl_coef": 1e-6, "train.optimizer.lr": 5e-3}
    ),
    "hot": Ill(planted="entropy-explosion", sets={"train.entropy_coef": 3.0}),
    "dying": Ill(planted="workers-die", kills=3, steps=30),
}


def main() -> int:
    """Run them, one after the other."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", default="")
    options.add_argument("--folder", type=Path)
    told = options.parse_args()
    folder = told.folder or Path(tempfile.mkdtemp(prefix="sick-"))
    folder.mkdir(parents=True, exist_ok=True)
    schedule = "\n\ndef over(*, progress, settings):\n    return settings.lr * (progress < 0.4)\n"
    (folder / "ill_rewards.py").write_text(REWARDS + schedule)
    wanted = [name for name in RUNS if not told.only or name in told.only.split(",")]
    missed = 0
    for name in wanted:
        named = called(RUNS[name], name=name.replace(" ", "-"), folder=folder)
        planted = RUNS[name].planted
        is_right = not named if planted == HEALTHY else planted in named
        missed += not is_right
        mark = "ok  " if is_right else "MISS"
        print(f"{mark} {name:26} planted {planted:22} called {', '.join(named) or HEALTHY}")
        sys.stdout.flush()
    print(f"{len(wanted) - missed} of {len(wanted)} called by their names")
    return min(missed, 1)


def called(ill: Ill, *, name: str, folder: Path) -> list[str]:
    """Names of the findings that are more than hints, at the end of the run."""
    sets = {"train.steps": ill.steps, "eval.every": 0, "run.dir": folder / "runs", **ill.sets}
    sets["warmup.steps"] = 0
    if not ill.from_seed:
        sets |= {"model.path": warm_model(folder), "model.scratch": "null"}
    run = folder / "runs" / name
    if not run.exists():
        command = [*MILES, "launch", "--recipe", "quickstart", "--name", name]
        command += [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        with open(folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
            if ill.kills:
                kill_engines(run, ill.kills, while_runs=process)
            process.wait()
    said = subprocess.run([*MILES, "status", str(run), "--json"], capture_output=True, text=True)
    verdict = json.loads(said.stdout)["verdict"]
    return [one["name"] for one in verdict["findings"] if one["level"] != "hint"]


def warm_model(folder: Path) -> Path:
    """The quickstart's model after its warm-up, as a Hugging Face folder."""
    model = folder / "warm-model"
    if not model.exists():
        make = [*MILES, "launch", "--recipe", "quickstart", "--name", "warm"]
        make += ["--set", "train.steps=1", "--set", f"run.dir={folder / 'runs'}"]
        subprocess.run(make, check=True, capture_output=True)
        run = str(folder / "runs" / "warm")
        export = [*MILES, "export", run, "--step", "0", "--to", str(model)]
        subprocess.run(export, check=True, capture_output=True)
    return model


def kill_engines(run: Path, count: int, *, while_runs: subprocess.Popen[bytes]) -> None:
    """End an engine's scheduler of this run, so many times, between steps."""
    killed, last = 0, 0
    while killed < count and while_runs.poll() is None:
        time.sleep(1.0)
        try:
            lines = (run / "events.jsonl").read_text().splitlines()
        except OSError:
            continue
        steps = [json.loads(line) for line in lines if '"StepDone"' in line]
        step = steps[-1]["step"] if steps else 0
        if step < last + 3 or step < 8:
            continue
        if (pid := engine_pid(run)) is not None:
            os.kill(pid, signal.SIGKILL)
            killed, last = killed + 1, step


def engine_pid(run: Path) -> int | None:
    """Of a scheduler of this run: by the memory record of its newest attempt."""
    try:
        lines = (run / "logs/latest/memory.jsonl").read_text().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        names = json.loads(line).get("names", {})
        for pid, name in names.items():
            if name.startswith("engine-") and Path(f"/proc/{pid}").exists():
                return int(pid)
    return None


if __name__ == "__main__":
    sys.exit(main())
