"""Run directories that tests write as a run would: by the real events, line for line. No run is
started for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from starlette.testclient import TestClient

from milescli.checkpoint.run_dir import RunDir
from milescli.core.events import (
    Event,
    PhaseSeconds,
    RolloutStats,
    RowStepDone,
    StepDone,
    to_record,
)
from milescli.core.types import StepReport
from milescli.web.app import Site, make_app
from milescli.web.gate import Gate
from milescli.web.shown import ShownRuns

KEY = "a-key-of-the-tests"
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


def report(*, loss: float = 0.1, **figures: float) -> StepReport:
    """Of a trainer's step."""
    return StepReport(
        loss=loss,
        grad_norm=1.0,
        lr=1e-6,
        logprob_diff_mean=0.001,
        logprob_diff_max=0.01,
        num_tokens=1000,
        num_loss_tokens=900,
        num_microbatches=2,
        forward_backward_s=1.0,
        optimizer_s=0.1,
        figures={"entropy": 0.5, **figures},
    )


def step_done(
    step: int, *, num_steps: int = 40, loss: float = 0.1, reward: float = 0.5
) -> StepDone:
    """Of RL."""
    rollout = RolloutStats(
        num_groups=4,
        num_samples=16,
        reward_mean=reward,
        reward_std=0.2,
        zero_variance_fraction=0.1,
        truncated_fraction=0.0,
        response_tokens_mean=20.0,
        response_tokens_max=30,
        prompt_tokens_mean=8.0,
        staleness_mean=0.0,
        staleness_max=0,
        dropped_groups=0,
        generated_tokens=320,
        reward_parts={"exact": reward},
        figures={"turns": 1.0},
    )
    seconds = PhaseSeconds(
        rollout_s=4.0, pack_s=0.5, train_s=3.0, publish_s=0.5, save_s=0.0, step_s=8.0
    )
    return StepDone(
        step=step,
        num_steps=num_steps,
        report=report(loss=loss),
        rollout=rollout,
        seconds=seconds,
        version=step,
        rollout_tokens_per_s=80.0,
        train_tokens_per_s=250.0,
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

    def steps(self, first: int, last: int, **what: float) -> None:
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


def site_of(folder: Path | None, *named: Path) -> Site:
    """Of a runs folder, or of some runs."""

    def fault(told: str) -> None:
        raise AssertionError(f"a fault of the server: {told}")

    return Site(shown=ShownRuns(folder=folder, named=named), fault=fault)


GATE = Gate(key=KEY, host="127.0.0.1", port=8000)


@contextmanager
def client_of(site: Site, gate: Gate = GATE, *, has_key: bool = True) -> Iterator[TestClient]:
    """That has been let in."""
    headers = {"authorization": f"Bearer {KEY}"} if has_key else {}
    with TestClient(
        make_app(site, gate),
        base_url="http://127.0.0.1:8000",
        headers=headers,
        follow_redirects=False,
    ) as client:
        yield client


def with_host(host: str) -> Gate:
    """That was told to listen there."""
    return replace(GATE, host=host)
