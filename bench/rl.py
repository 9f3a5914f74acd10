"""A whole run of `miles launch` beside one of TRL's GRPOTrainer, in turns:

    python bench/rl.py [--pairs 1] [--steps 80] [--algorithm gspo] [--folder DIR]

The same task, weights to begin with, prompts, batch and settings (`sums.py`): a Qwen3 of 1 M
parameters, sums of three digits, 16 prompts x 8 samples a step of at most 48 tokens, one update a
step, 200 held-out prompts greedily before the first step and after every tenth. Each run is the
command as a user types it, from its start to its exit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sums
from pairs import Machine, Table, command_line, report, take_turns
from sides import ROOT, SideDied, exit_on_term, side_environment

RUN_TIMEOUT_S = 7200.0
"""Bound on one run of a side."""
POLL_S = 0.02
EVAL_EVERY = 10
NUM_REWARDS = 10
"""Steps at the beginning and at the end of a run whose rewards are averaged."""
TRL = "TRL's GRPOTrainer on a CPU, generating with transformers; fp32, one batch of 128"
DIFFERENCES = (
    "miles writes two checkpoints with the optimizer's state, TensorBoard and its event files, "
    "and compares engine with trainer before the first step; TRL saves the final weights"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One command from its start to its exit."""

    seconds: float
    first_s: float | None
    """From its start until the event that was waited for; None where none was."""


def timed(
    command: Sequence[str],
    *,
    log: Path,
    events: Path | None = None,
    wanted: Callable[[dict[str, Any]], bool] = lambda _: False,
) -> Timed:
    """Run it. `events`: the file of JSON lines that it writes as it goes, `wanted` the line whose
    time counts. Raises SideDied where it fails or takes too long."""
    began, first = time.monotonic(), None

    def look() -> float | None:
        """Seconds until now, where the line is there."""
        seen = events is not None and any(map(wanted, read_events(events)))
        return time.monotonic() - began if seen else None

    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=side_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    with _ended(process):
        while process.poll() is None:
            first = first or look()
            if time.monotonic() - began > RUN_TIMEOUT_S:
                raise _failed(command, log, f"took more than {RUN_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
    seconds = time.monotonic() - began
    if process.returncode:
        raise _failed(command, log, f"ended with {process.returncode}")
    return Timed(seconds=seconds, first_s=first or look())


def read_events(file: Path) -> list[dict[str, Any]]:
    """The whole lines that are there by now."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever happens within, the process group does not outlive it."""
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(60)


def _failed(command: Sequence[str], log: Path, how: str) -> SideDied:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return SideDied("\n".join([f"`{' '.join(command)}` {how}; its log ends:", *lines[-30:]]))


def miles_command(*words: str) -> list[str]:
    """`miles WORDS` of this checkout."""
    return [sys.executable, "-m", "milescli", *words]


def peer_command(*words: str) -> list[str]:
    """`peer_run.py WORDS`."""
    return [sys.executable, "bench/peer_run.py", *words]


def run_miles(
    folder: Path, name: str, *, num_steps: int, algorithm: str | None = None
) -> dict[str, float]:
    """`miles launch`; the run is `folder/runs/NAME` afterwards."""
    file, events = folder / "recipe.yaml", folder / "runs" / name / "events.jsonl"
    told = sums.recipe(folder, eval_every=EVAL_EVERY, algorithm=algorithm)
    file.write_text(json.dumps(told), encoding="utf-8")
    done = timed(
        miles_command(
            "launch", "--recipe", str(file), "--name", name, "--steps", str(num_steps), "--quiet"
        ),
        log=folder / "miles.log",
        events=events,
        wanted=lambda event: event["event"] == "StepDone",
    )
    seen = read_events(events)
    steps = [event for event in seen if event["event"] == "StepDone"]
    return _figures(
        done,
        steps_s=[step["seconds"]["step_s"] for step in steps],
        lengths=[step["rollout"]["response_tokens_mean"] for step in steps],
        rewards=[step["rollout"]["reward_mean"] for step in steps],
        accuracies=[event["accuracy"] for event in seen if event["event"] == "EvalDone"],
    )


def run_trl(
    folder: Path, name: str, *, num_steps: int, algorithm: str | None = None
) -> dict[str, float]:
    """The same by TRL; its model is `folder/trl/NAME/model` afterwards."""
    out = folder / "trl" / name
    words = ["grpo", "--folder", str(folder), "--steps", str(num_steps), "--out", str(out)]
    words += ["--algorithm", algorithm] if algorithm else []
    done = timed(
        peer_command(*words, "--eval-every", str(EVAL_EVERY)),
        log=folder / "trl.log",
        events=out / "events.jsonl",
        wanted=lambda event: event["event"] == "step",
    )
    seen = read_events(out / "events.jsonl")
    return _figures(
        done,
        steps_s=[event["seconds"] for event in seen if event["event"] == "step"],
        lengths=[event["tokens"] for event in seen if event["event"] == "log"],
        rewards=[event["reward"] for event in seen if event["event"] == "log"],
        accuracies=[event["accuracy"] for event in seen if event["event"] == "eval"],
    )


def _figures(
    done: Timed,
    *,
    steps_s: Sequence[float],
    lengths: Sequence[float],
    rewards: Sequence[float],
    accuracies: Sequence[float],
) -> dict[str, float]:
    assert done.first_s is not None and len(steps_s) == len(lengths), (done, steps_s, lengths)
    assert len(accuracies) >= 2, accuracies
    return {
        "total_s": done.seconds,
        "step_s": statistics.median(steps_s),
        "length": statistics.mean(lengths),
        "reward_first": statistics.mean(rewards[:NUM_REWARDS]),
        "reward_last": statistics.mean(rewards[-NUM_REWARDS:]),
        "first_step_s": done.first_s,
        "before": accuracies[0],
        "after": accuracies[-1],
    }


@contextmanager
def task_folder(options: argparse.Namespace) -> Iterator[Path]:
    """With model and data in it; `--folder` keeps them for the next time."""
    exit_on_term()
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        sums.prepare(folder, warmup_steps=options.warmup_steps)
        yield folder


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Those of benchmarks on this task."""
    parser.add_argument("--folder", type=Path, help="keep the model, data and runs here")
    parser.add_argument("--warmup-steps", type=int, default=400, help="supervised, of the model")


def unique(folder: Path, number: int) -> str:
    """A name for a run, also in a folder that was used before."""
    return f"{number}-{time.strftime('%H%M%S')}" if (folder / "runs").exists() else str(number)


def main() -> None:
    """The command line."""
    parser = command_line(__doc__, num_pairs=1)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument(
        "--algorithm", choices=list(sums.PEER_FORMS), help="one that both have, by the same pieces"
    )
    add_task_options(parser)
    options = parser.parse_args()
    result = Table(peer=TRL, machine=Machine.read(), notes=[DIFFERENCES])
    chosen = {"num_steps": options.steps, "algorithm": options.algorithm}
    with task_folder(options) as folder:
        pairs = take_turns(
            lambda number: run_miles(folder, unique(folder, number), **chosen),
            lambda number: run_trl(folder, unique(folder, number), **chosen),
            num_pairs=options.pairs,
            num_warmups=0,
        )
    rows = {
        "total_s": (f"{options.steps} steps, command to exit", "s", "less"),
        "step_s": ("a step (median)", "s", "less"),
        "first_step_s": ("command to first optimizer step", "s", "less"),
        "length": ("mean response", "tokens", "neither"),
        "reward_first": (f"mean reward, first {NUM_REWARDS} steps", "of 1", "neither"),
        "reward_last": (f"mean reward, last {NUM_REWARDS} steps", "of 1", "neither"),
        "before": ("greedy held-out accuracy before", "of 1", "neither"),
        "after": ("greedy held-out accuracy after", "of 1", "neither"),
    }
    for name, (what, unit, better) in rows.items():
        result.add(pairs, name=name, what=what, unit=unit, better=better)
    report(result, options)


if __name__ == "__main__":
    main()
