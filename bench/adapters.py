"""Several adapters over one model: in one run, beside one after the other.

    python bench/adapters.py [--pairs 3] [--steps 20] [--adapters 2] [--json FILE]

Both sides train the same adapters on the same samples, to equal weights. Seconds of the steps are
from the first adapter's first step to the last adapter's last one, evaluations and checkpoints
included; of one after the other the sum over the runs. The whole is from the shell, with every
start. The base is of a quickstart whose warm-up is short, made first.
"""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Literal

from pairs import Figures, Machine, Table, command_line
from rl import miles_command, read_events, timed, unique
from sides import exit_on_term

ROWS: dict[str, tuple[str, str, Literal["more", "less", "neither"]]] = {
    "steps_s": ("all steps", "s", "less"),
    "whole_s": ("all of it, from the shell", "s", "less"),
    "tokens": ("tokens sampled", "tokens", "neither"),
}


def recipe(folder: Path, base: Path, steps: int) -> dict[str, object]:
    """As a user would write it."""
    return {
        "model": {"path": str(base)},
        "data": {"prompts": "task:sums", "max_prompt_tokens": 512},
        "rollout": {"max_response_tokens": 32, "reward": "gsm8k"},
        "train": {"steps": steps, "lora": {"rank": 16}, "optimizer": {"lr": 3e-3}},
        "checkpoint": {"every": 0},
        "run": {"dir": str(folder / "runs"), "trackers": []},
    }


def together(folder: Path, base: Path, name: str, *, steps: int, adapters: int) -> Figures:
    """One run of all."""
    seeds = {f"a{n}": {"run": {"seed": n}} for n in range(adapters)}
    whole_s = _launch(folder, name, {**recipe(folder, base, steps), "adapters": seeds})
    runs = [folder / "runs" / name / "adapters" / each for each in seeds]
    spans = [_span(run) for run in runs]
    began, ended = min(span[0] for span in spans), max(span[1] for span in spans)
    tokens = sum(_tokens(run) for run in runs)
    return {"steps_s": ended - began, "whole_s": whole_s, "tokens": tokens}


def in_turn(folder: Path, base: Path, name: str, *, steps: int, adapters: int) -> Figures:
    """One run after the other."""
    whole_s = steps_s = tokens = 0.0
    for seed in range(adapters):
        own = {**recipe(folder, base, steps), "run": {"dir": str(folder / "runs"), "seed": seed}}
        whole_s += _launch(folder, f"{name}-{seed}", own)
        run = folder / "runs" / f"{name}-{seed}"
        began, ended = _span(run)
        steps_s += ended - began
        tokens += _tokens(run)
    return {"steps_s": steps_s, "whole_s": whole_s, "tokens": tokens}


def _launch(folder: Path, name: str, told: dict[str, object]) -> float:
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(told), encoding="utf-8")
    command = miles_command("launch", "--recipe", str(file), "--name", name, "--quiet")
    return timed(command, log=folder / "miles.log").seconds


def _span(run: Path) -> tuple[float, float]:
    """When its steps began, and when the last was done: seconds, of a clock that tells whole
    ones."""
    seen = read_events(run / "events.jsonl")
    times = {
        event["event"]: datetime.fromisoformat(event["time"]).timestamp()
        for event in seen
        if event["event"] == "StepDone" or event.get("phase") == "train"
    }
    return times["PhaseStarted"], times["StepDone"]


def _tokens(run: Path) -> float:
    seen = read_events(run / "events.jsonl")
    return sum(e["rollout"]["generated_tokens"] for e in seen if e["event"] == "StepDone")


def main() -> None:
    """The command line."""
    parser = command_line(__doc__, num_pairs=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--adapters", type=int, default=2)
    options = parser.parse_args()
    exit_on_term()
    pairs = []
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as temporary:
        folder = Path(temporary)
        sets = [f"--set={each}" for each in ("warmup.steps=100", f"run.dir={folder / 'runs'}")]
        words = ["--recipe", "quickstart", "--name", "base", "--steps", "1", *sets, "--quiet"]
        command = miles_command("launch", *words)
        timed(command, log=folder / "miles.log")
        base = folder / "runs" / "base" / "checkpoints" / "step_0"
        how = {"steps": options.steps, "adapters": options.adapters}
        for number in range(options.pairs):
            name, sides = unique(folder, number), [together, in_turn]
            measured = {
                side: side(folder, base, name + side.__name__, **how)
                for side in (sides if number % 2 == 0 else sides[::-1])
            }
            pairs.append((measured[together], measured[in_turn]))
            shown = "; ".join(
                f"{side.__name__} " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items())
                for side, figures in measured.items()
            )
            print(f"pair {number + 1}/{options.pairs}: {shown}", flush=True)
    table = Table(
        peer="one run of miles after the other; `miles` is one run of all", machine=Machine.read()
    )
    for name, (what, unit, better) in ROWS.items():
        table.add(pairs, name=name, what=what, unit=unit, better=better)
    print(f"\n{table}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(pairs, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
