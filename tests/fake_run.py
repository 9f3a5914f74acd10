"""Runs that never were: events as a real run would send them, and directories as it would write
them. For tests, and to look at the screen: `python -m tests.fake_run`."""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from milescli.checkpoint.run_dir import RunDir
from milescli.console.live import LiveRun
from milescli.console.output import Mode, Output
from milescli.core.events import (
    CheckpointSaved,
    EngineTrainerChecked,
    EvalDone,
    Event,
    Notice,
    PhaseSeconds,
    PhaseStarted,
    RolloutStats,
    RowStepDone,
    RunEnded,
    StepDone,
    WarmupStepDone,
    to_record,
)
from milescli.core.types import StepReport


def report(
    *, loss: float, lr: float = 1e-3, entropy: float = 0.5, diff: float = 2.4e-6
) -> StepReport:
    """A StepReport with the figures that are shown."""
    return StepReport(
        loss=loss,
        grad_norm=0.83,
        lr=lr,
        logprob_diff_mean=diff / 10,
        logprob_diff_max=diff,
        logprob_diff_tokens=0,
        num_tokens=13_800,
        num_loss_tokens=9_400,
        num_microbatches=2,
        forward_backward_s=0.9,
        optimizer_s=0.1,
        figures={
            "policy_loss": loss,
            "entropy": entropy,
            "kl": 0.0,
            "clip_fraction": 0.012,
            "ratio_mean": 1.0,
        },
    )


def step_done(
    step: int,
    num_steps: int = 40,
    *,
    reward: float = 0.5,
    loss: float = 0.01,
    step_s: float = 3.1,
    diff: float = 2.4e-6,
    **rollout: Any,
) -> StepDone:
    """One RL step. `rollout`: more of its RolloutStats."""
    stats = RolloutStats(
        num_groups=32,
        num_samples=256,
        reward_mean=reward,
        reward_std=0.3,
        zero_variance_fraction=0.22,
        truncated_fraction=0.031,
        response_tokens_mean=36.8,
        response_tokens_max=64,
        prompt_tokens_mean=17.0,
        staleness_mean=0.0,
        staleness_max=0,
        dropped_groups=0,
        generated_tokens=9_400,
        **rollout,
    )
    seconds = PhaseSeconds(
        rollout_s=step_s * 0.66,
        pack_s=0.01,
        train_s=step_s * 0.3,
        publish_s=step_s * 0.03,
        save_s=0.0,
        step_s=step_s,
    )
    return StepDone(
        step=step,
        num_steps=num_steps,
        report=report(loss=loss, entropy=0.9 - reward / 2, diff=diff),
        rollout=stats,
        seconds=seconds,
        version=step,
        rollout_tokens_per_s=4_600.0,
        train_tokens_per_s=14_800.0,
    )


def row_step_done(step: int, *, num_steps: int = 40, loss: float = 2.0) -> RowStepDone:
    """Over rows."""
    return RowStepDone(
        step=step,
        num_steps=num_steps,
        epoch=step / 10,
        report=report(loss=loss),
        pack_s=0.1,
        train_s=1.0,
        save_s=0.0,
        step_s=1.1,
        tokens_per_s=900.0,
    )


def eval_done(step: int, accuracy: float) -> EvalDone:
    """One evaluation."""
    return EvalDone(
        step=step,
        accuracy=accuracy,
        num_prompts=200,
        truncated_fraction=0.01,
        response_tokens_mean=35.0,
        seconds=2.2,
        path=f"eval/step_{step}.jsonl",
    )


def events(*, num_warmup: int = 60, num_steps: int = 40, fails: bool = False) -> Iterator[Event]:
    """A whole run."""
    noise = random.Random(0)
    yield PhaseStarted(phase="start", detail="Ray, 1 trainer rank, 1 engine")
    yield Notice(text="12 prompts are longer than 48 tokens and were dropped")
    yield PhaseStarted(phase="warmup", detail=f"{num_warmup} supervised steps")
    for step in range(1, num_warmup + 1):
        loss = 6.2 * math.exp(-step / 15) + 0.6 + noise.uniform(-0.03, 0.03)
        yield WarmupStepDone(
            step=step, num_steps=num_warmup, report=report(loss=loss, diff=0.0), step_s=0.41
        )
    yield PhaseStarted(phase="check", detail="engine against trainer")
    yield EngineTrainerChecked(
        num_tokens=412,
        diff_mean=2.1e-7,
        diff_max=1.9e-6,
        bound_max=1e-4,
        floor_mean=1.8e-7,
        floor_max=2.0e-6,
        kl=3e-12,
        floor_kl=2e-12,
        far=0.0,
        times=1.1,
        agreement="equal",
    )
    yield PhaseStarted(phase="eval", detail="200 prompts")
    yield eval_done(0, 0.405)
    yield PhaseStarted(phase="train", detail=f"steps 1 to {num_steps}")
    for step in range(1, num_steps + 1):
        reward = 0.95 / (1 + math.exp(-(step - 12) / 6)) + noise.uniform(-0.03, 0.03)
        yield step_done(
            step,
            num_steps,
            reward=reward,
            loss=noise.uniform(-0.02, 0.02),
            diff=noise.uniform(1e-6, 6e-6),
        )
        if step % 10 == 0:
            yield eval_done(step, min(1.0, reward + 0.02))
        if step == 20:
            yield CheckpointSaved(
                step=20, path="checkpoints/step_20", size_bytes=23_400_000, seconds=0.7
            )
        if fails and step == num_steps // 2:
            yield RunEnded(outcome="failed", step=step, seconds=91.0)
            return
    yield RunEnded(outcome="done", step=num_steps, seconds=186.0)


BEGAN_S = 1_764_000_000.0
RECIPE = """\
name: "tiny"  # recipe tiny.yaml
train:
  steps: 40  # --set train.steps=40
  optimizer:
    lr: 1e-06  # default
rollout:
  stop: ["a", "b"]  # default
"""


@dataclass(kw_only=True)
class WrittenRun:
    """A run's directory, which grows as its test says."""

    path: Path
    at_s: float = BEGAN_S
    """When the next event happens, seconds since 1970."""
    attempts: int = field(default=0)

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.run.recipe_file.write_text(RECIPE, encoding="utf-8")

    @property
    def run(self) -> RunDir:
        """As the server has it."""
        return RunDir(self.path)

    def tell(self, *events: Event, every_s: float = 8.0) -> None:
        """Append events, one every few seconds."""
        with self.run.events_file.open("a", encoding="utf-8") as file:
            for event in events:
                self.at_s += every_s
                time = datetime.fromtimestamp(self.at_s, UTC).isoformat()
                file.write(json.dumps({"time": time, **to_record(event)}) + "\n")

    def steps(self, first: int, last: int, **what: Any) -> None:
        """Steps of RL."""
        self.tell(*(step_done(step, **what) for step in range(first, last + 1)))

    def attempt(self, **logs: str) -> Path:
        """A new attempt with logs: `engine_0="text"` is engine-0.log."""
        folder = self.run.new_attempt()
        for name, text in logs.items():
            (folder / f"{name.replace('_', '-')}.log").write_text(text, encoding="utf-8")
        return folder

    def keep(self, step: int, *samples: Mapping[str, object]) -> None:
        """Samples of a step; what is not said is as always."""
        self.run.rollouts_dir.mkdir(exist_ok=True)
        lines = [json.dumps({**SAMPLE, **sample}) for sample in samples]
        file = self.run.rollouts_dir / f"step_{step}.jsonl"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


SAMPLE: Mapping[str, object] = {
    "prompt": "What is 2 + 3?",
    "response": "#### 5",
    "reward": 1.0,
    "stop_reason": "stop",
    "versions": [1],
    "seed": 7,
    "prompt_index": 0,
    "response_ids": [1, 2],
}


if __name__ == "__main__":
    speaker = Output(Mode(sys.argv[1]) if len(sys.argv) > 1 else Mode.HUMAN)
    with LiveRun(speaker, name="quickstart-1") as view:
        for happened in events():
            view(happened)
            time.sleep(0.02)
    if len(sys.argv) > 2:
        view.save_svg(Path(sys.argv[2]), command="miles launch --recipe quickstart")
