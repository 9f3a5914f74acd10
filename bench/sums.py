"""The task of `rl.py` and `start.py`: sums of two numbers of three digits, and a model of 1 M
parameters that can do some of them. Made once for both sides, in the form that both read."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from json import dumps
from pathlib import Path

from sides import ROOT, side_environment

from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.data.tasks import Task, TaskRow, is_heldout, make_rows, work_out_sum
from milescli.models.scratch import make_model
from milescli.recipe.model import ScratchModel

MODEL = ScratchModel(num_layers=5)
NUM_HELDOUT = 200
MAX_RESPONSE_TOKENS = 48
PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 16, 8
LR, BETA2, CLIP_LOW, CLIP_HIGH = 3e-5, 0.98, 0.2, 0.28
ROUNDED_SHARE = 0.2
"""Of the demonstrations: they round the sum to tens, and are right once in ten."""
WARMUP_TIMEOUT_S = 1800.0


def prepare(folder: Path, *, warmup_steps: int) -> None:
    """`model/`, `train.jsonl` and `heldout.jsonl` in `folder`; what is there from an earlier
    benchmark is taken as it is."""
    if (folder / "model").exists():
        print(f"taking model and data from {folder}", flush=True)
        return
    write(folder)
    print(f"warming the model up, {warmup_steps} supervised steps (not measured)", flush=True)
    # by plain PyTorch: the weights that both sides begin with are of neither
    command = [sys.executable, "bench/peer_run.py", "warm-up", "--folder", str(folder)]
    subprocess.run(
        [*command, "--steps", str(warmup_steps)],
        cwd=ROOT,
        env=side_environment(),
        check=True,
        timeout=WARMUP_TIMEOUT_S,
    )


def write(folder: Path) -> None:
    """`train.jsonl`, `heldout.jsonl`, and in `fresh/` the model with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "train.jsonl", heldout=False, num_rows=4096)
    _write(folder / "heldout.jsonl", heldout=True, num_rows=NUM_HELDOUT)
    fresh = folder / "fresh"
    text = (folder / "train.jsonl").read_text(encoding="utf-8")
    make_scratch_tokenizer(text.splitlines(), MODEL.vocab_size, fresh)
    make_model(MODEL, fresh, seed=0)


PEER_FORMS: dict[str, dict[str, object]] = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.2},
    "dr_grpo": {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
    },
    "lite_ppo": {
        "loss_type": "dapo",
        "scale_rewards": "batch",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
    },
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "luspo": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
}
"""Algorithms that TRL has as well: what its GRPOConfig is told for `train.algorithm`."""


def peer_settings(algorithm: str | None) -> dict[str, object]:
    """What TRL is told of the algorithm; None: DAPO's clip and mean, the defaults of both."""
    if algorithm is None:
        return {"epsilon": CLIP_LOW, "epsilon_high": CLIP_HIGH}
    return PEER_FORMS[algorithm]


def recipe(folder: Path, *, eval_every: int, algorithm: str | None = None) -> dict[str, object]:
    """What miles is told; the settings that `peer_run.py` gives to TRL."""
    own = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
    return {
        "model": {"path": str(folder / "model")},
        "data": {
            "prompts": str(folder / "train.jsonl"),
            "eval": str(folder / "heldout.jsonl"),
            "max_prompt_tokens": 64,
        },
        "rollout": {
            "prompts_per_step": PROMPTS_PER_STEP,
            "samples_per_prompt": SAMPLES_PER_PROMPT,
            "max_response_tokens": MAX_RESPONSE_TOKENS,
            "reward": "gsm8k",
        },
        "train": {
            **(own if algorithm is None else {"algorithm": algorithm}),
            "optimizer": {"lr": LR, "beta2": BETA2},
        },
        "eval": {"every": eval_every, "num_prompts": NUM_HELDOUT},
        "checkpoint": {"every": 0},
        "run": {"dir": str(folder / "runs")},
    }


def _write(file: Path, *, heldout: bool, num_rows: int) -> None:
    task = Task(rows=lambda source: _sums(source, heldout=heldout), num_rows=num_rows)
    lines = [dumps(asdict(row)) + "\n" for row in make_rows(task, seed=0)]
    file.write_text("".join(lines), encoding="utf-8")


def _sums(source: random.Random, *, heldout: bool) -> Iterator[TaskRow]:
    while True:
        a, b = source.randrange(100, 1000), source.randrange(100, 1000)
        if is_heldout(a, b) is not heldout:
            continue
        rounded = f"#### {(a + b + 5) // 10 * 10}"
        yield TaskRow(
            prompt=f"What is {a} + {b}?",
            label=str(a + b),
            demonstration=rounded if source.random() < ROUNDED_SHARE else work_out_sum(a, b),
        )
