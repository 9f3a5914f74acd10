"""Three ways of running rollout beside training, in turns, on responses with a long tail:

    python bench/flight.py [--pairs 3] [--steps 24] [--staleness 2] [--json FILE]

strict (`rollout.max_staleness=0`), ahead (in the order of the prompts), done (`rollout.order=done`)
and done_retry (the same with `rollout.stale_groups=retry`): equal model, seeds and number of
samples; one engine and one trainer rank of one thread each. Lengths are log-normal
(`long_tail.py`), 8 prompts x 4 samples a step. Seconds are those of the steps, without start and
evaluations. Each round starts with another side, so that what else the machine does meets all.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pairs import Figures, Machine, Table, command_line
from rl import miles_command, read_events, timed, unique
from sides import ROOT, exit_on_term

SIDES: dict[str, dict[str, object]] = {
    "strict": {"max_staleness": 0},
    "ahead": {"order": "prompts"},
    "done": {"order": "done"},
    "done_retry": {"order": "done", "stale_groups": "retry"},
}
COMPARED = (("ahead", "strict"), ("done", "strict"), ("done_retry", "strict"), ("done", "ahead"))
ROWS: dict[str, tuple[str, str, Literal["more", "less", "neither"]]] = {
    "seconds": ("all steps", "s", "less"),
    "trainer_idle": ("trainer waits for rollout", "share of the time", "less"),
    "rollout_idle": ("no sample is being made", "share of the time", "less"),
    "running": ("samples being made, mean over the time", "samples", "more"),
    "tokens": ("tokens trained on", "tokens", "neither"),
    "wasted": ("tokens given up", "tokens", "less"),
    "stale_groups": ("groups given up as too old", "groups", "less"),
    "staleness_mean": ("staleness, mean", "versions", "neither"),
    "staleness_max": ("staleness, max", "versions", "neither"),
    "before": ("held-out reward before, sampled", "of 1", "neither"),
    "after": ("held-out reward after, sampled", "of 1", "neither"),
}


def recipe(folder: Path, *, side: str, steps: int, staleness: int) -> dict[str, object]:
    """As a user would write it."""
    return {
        "model": {"scratch": {}},
        "data": {"prompts": "task:sums", "eval": "task:sums-heldout", "max_prompt_tokens": 48},
        "rollout": {
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "max_response_tokens": 512,
            "generation": "long_tail:capped",
            "reward": "long_tail:digits",
            "max_staleness": staleness,
            **SIDES[side],
        },
        "train": {"steps": steps, "optimizer": {"lr": 1e-3}},
        "eval": {"num_prompts": 32, "every": 0, "temperature": 1.0},
        "engines": {"num": 1, "placement": "split"},
        "checkpoint": {"every": 0},
        "machine": {"cpu_threads": 1},
        "run": {"dir": str(folder / "runs"), "trackers": []},
    }


def run(folder: Path, name: str, *, side: str, steps: int, staleness: int) -> Figures:
    """One `miles launch`."""
    file, events = folder / f"{side}.yaml", folder / "runs" / name / "events.jsonl"
    told = recipe(folder, side=side, steps=steps, staleness=staleness)
    file.write_text(json.dumps(told), encoding="utf-8")
    command = miles_command("launch", "--recipe", str(file), "--name", name, "--quiet")
    timed(command, log=folder / "miles.log")
    seen = read_events(events)
    return figures(
        [event for event in seen if event["event"] == "StepDone"],
        accuracies=[event["accuracy"] for event in seen if event["event"] == "EvalDone"],
    )


def figures(steps: Sequence[Mapping[str, Any]], *, accuracies: Sequence[float]) -> Figures:
    """Of a run's steps and evaluations, as its events have them."""

    def total(part: str, name: str) -> float:
        return sum(step[part][name] for step in steps)

    seconds = total("seconds", "step_s")
    return {
        "seconds": seconds,
        "trainer_idle": total("seconds", "rollout_s") / seconds,
        "rollout_idle": total("flow", "idle_s") / seconds,
        "running": sum(s["flow"]["running_mean"] * s["seconds"]["step_s"] for s in steps) / seconds,
        "tokens": total("rollout", "generated_tokens"),
        "wasted": total("flow", "wasted_tokens") + total("publish", "discarded_tokens"),
        "stale_groups": total("flow", "stale_groups"),
        "staleness_mean": statistics.mean(s["rollout"]["staleness_mean"] for s in steps),
        "staleness_max": max(s["rollout"]["staleness_max"] for s in steps),
        "before": accuracies[0],
        "after": accuracies[-1],
    }


def table(one: str, other: str, rounds: Sequence[Mapping[str, Figures]]) -> Table:
    """Of two of the sides."""
    result = Table(peer=f"{other}; `miles` is {one}", machine=Machine.read())
    for name, (what, unit, better) in ROWS.items():
        pairs = [(figures[one], figures[other]) for figures in rounds]
        result.add(pairs, name=name, what=what, unit=unit, better=better)
    return result


def main() -> None:
    """The command line."""
    parser = command_line(__doc__, num_pairs=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--staleness", type=int, default=2, help="of ahead and done")
    options = parser.parse_args()
    exit_on_term()
    # the runs import the task by its name
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "bench"), str(ROOT)])
    rounds = list[dict[str, Figures]]()
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as temporary:
        folder, sides = Path(temporary), list(SIDES)
        for number in range(options.pairs):
            measured = dict[str, Figures]()
            for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                name = unique(folder, number) + side
                measured[side] = run(
                    folder, name, side=side, steps=options.steps, staleness=options.staleness
                )
                shown = ", ".join(f"{key} {value:.3g}" for key, value in measured[side].items())
                print(f"round {number + 1}/{options.pairs}, {side}: {shown}", flush=True)
            rounds.append(measured)
    tables = [table(one, other, rounds) for one, other in COMPARED]
    for each in tables:
        print(f"\n{each}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
