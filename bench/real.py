"""A real pretrained model (SmolLM2-135M-Instruct) beside TRL's GRPOTrainer, in turns:

    python bench/real.py [--pairs 1] [--steps 12] [--model FOLDER]

The recipe `smollm2-135m` with the same prompts, reward, batch (8 prompts x 8 samples of at most 40
tokens), learning rate and float32 on both sides. Each run is one command from its start to its
exit. Memory is what the computer has less while it runs, so nothing else should. The model is made
of a PyPI package (`real_models.py`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import real_models
from pairs import Machine, Table, command_line, report, take_turns
from rl import miles_command, read_events, timed
from sides import exit_on_term

from milescli.data.tasks import write_task
from milescli.rollout.rewards.text.instructions import instructions

PROMPTS, SAMPLES, TOKENS, LR = 8, 8, 40, 1e-5
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MODEL = "smollm2-135m"
TRL = "TRL's GRPOTrainer on a CPU, generating with transformers; fp32, one batch of 64"
DIFFERENCES = (
    "miles writes one checkpoint with the optimizer's state at the end, and compares engine with "
    "trainer before the first step; TRL saves the final weights; neither evaluates"
)


class Peak:
    """The most memory that the computer has had less since it was made, in GiB."""

    def __init__(self) -> None:
        self._free = self._least = psutil.virtual_memory().available
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(0.1):
            self._least = min(self._least, psutil.virtual_memory().available)

    def end(self) -> float:
        """Stop looking."""
        self._done.set()
        self._thread.join()
        return (self._free - self._least) / 2**30


def run_miles(folder: Path, model: Path, name: str, *, num_steps: int) -> dict[str, float]:
    """`miles launch`; the run is `folder/runs/NAME` afterwards."""
    events = folder / "runs" / name / "events.jsonl"
    settings = {
        "model.path": str(model),
        "data.prompts": str(folder / "instructions.jsonl"),
        "data.eval": "null",
        "eval.every": 0,
        "checkpoint.every": 0,
        "run.dir": str(folder / "runs"),
        "train.steps": num_steps,
        "train.precision": "fp32",
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    peak = Peak()
    done = timed(
        miles_command("launch", "--recipe", MODEL, "--name", name, "--quiet", *sets),
        log=folder / "miles.log",
        events=events,
        wanted=lambda event: event["event"] == "StepDone",
    )
    steps = [event for event in read_events(events) if event["event"] == "StepDone"]
    return {
        "total_s": done.seconds,
        "first_step_s": done.first_s or done.seconds,
        "step_s": statistics.median(step["seconds"]["step_s"] for step in steps),
        "memory_gib": peak.end(),
        **_rewards([step["rollout"]["reward_mean"] for step in steps]),
    }


def run_trl(folder: Path, model: Path, name: str, *, num_steps: int) -> dict[str, float]:
    """The same by TRL, in a process of its own."""
    out = folder / "trl" / name
    words = ["bench/real.py", "--peer", str(out), "--model", str(model)]
    words += ["--rows", str(folder / "instructions.jsonl"), "--steps", str(num_steps)]
    peak = Peak()
    done = timed(
        [sys.executable, *words],
        log=folder / "trl.log",
        events=out / "events.jsonl",
        wanted=lambda event: event["event"] == "step",
    )
    seen = read_events(out / "events.jsonl")
    return {
        "total_s": done.seconds,
        "first_step_s": done.first_s or done.seconds,
        "step_s": statistics.median(e["seconds"] for e in seen if e["event"] == "step"),
        "memory_gib": peak.end(),
        **_rewards([event["reward"] for event in seen if event["event"] == "log"]),
    }


def _rewards(rewards: list[float]) -> dict[str, float]:
    third = max(1, len(rewards) // 3)
    return {
        "reward_first": statistics.mean(rewards[:third]),
        "reward_last": statistics.mean(rewards[-third:]),
    }


def train_with_trl(out: Path, model: Path, rows: Path, *, num_steps: int) -> None:
    """What a user of TRL would write. Writes `out/events.jsonl` as it goes."""
    from datasets import Dataset
    from peer_run import as_chat, as_peer_reward, clock, load, read_rows
    from trl import GRPOConfig, GRPOTrainer

    out.mkdir(parents=True)
    events = (out / "events.jsonl").open("w", buffering=1)

    def tell(event: str, **values: float) -> None:
        events.write(json.dumps({"event": event, **values}) + "\n")

    policy, tokenizer = load(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = GRPOConfig(
        str(out),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=0,
        max_steps=num_steps,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        policy,
        reward_funcs=as_peer_reward(instructions),
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": as_chat(row), "label": row["label"]} for row in read_rows(rows)]
        ),
        processing_class=tokenizer,
        callbacks=[clock(tell)],
    )
    trainer.train()
    trainer.save_model(str(out / "model"))


def compare(options: argparse.Namespace, folder: Path) -> Table:
    """Both sides, in turns."""
    model = options.model or folder / MODEL
    real_models.make(MODEL, model)
    write_task("instructions", folder, seed=0)
    result = Table(peer=TRL, machine=Machine.read(), notes=[DIFFERENCES])
    pairs = take_turns(
        lambda number: run_miles(folder, model, str(number), num_steps=options.steps),
        lambda number: run_trl(folder, model, str(number), num_steps=options.steps),
        num_pairs=options.pairs,
        num_warmups=0,
    )
    rows = {
        "total_s": (f"{options.steps} steps, command to exit", "s", "less"),
        "first_step_s": ("command to first optimizer step", "s", "less"),
        "step_s": ("a step (median)", "s", "less"),
        "memory_gib": ("memory, all processes, at most", "GiB", "less"),
        "reward_first": ("mean reward, first third of the steps", "of 1", "neither"),
        "reward_last": ("mean reward, last third", "of 1", "neither"),
    }
    for name, (what, unit, better) in rows.items():
        result.add(pairs, name=name, what=what, unit=unit, better=better)
    return result


def main() -> None:
    """The command line."""
    parser = command_line(__doc__, num_pairs=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", type=Path, help="a folder that is there; else it is made")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer is not None:
        train_with_trl(options.peer, options.model, options.rows, num_steps=options.steps)
        return
    exit_on_term()
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        report(compare(options, Path(folder)), options)


if __name__ == "__main__":
    main()
