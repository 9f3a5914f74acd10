"""Runs that a test makes up, step by step, of the very events that a run writes: a healthy one, of
which each planted illness changes a figure or two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from milescli.core.events import (
    EngineTrainerChecked,
    EvalDone,
    Event,
    FlowStats,
    PhaseSeconds,
    PhaseStarted,
    PublishStats,
    RolloutStats,
    RowStepDone,
    RunEnded,
    StepDone,
    ValidationDone,
    WorkerLost,
    WorkerReplaced,
    to_record,
)
from milescli.core.history import History
from milescli.core.types import StepReport
from milescli.insight.case import Verdict
from milescli.insight.facts import RunFacts
from milescli.insight.samples import KeptSample
from milescli.insight.verdict import verdict_of

Course = Callable[[float], float]
"""Share of the run that is done, 0 to 1 -> a figure's expected value."""
BEGAN_S = 1_764_000_000.0
PROMPTS = 16


def line(first: float, last: float) -> Course:
    """Straight."""
    return lambda share: first + (last - first) * share


def saturating(first: float, last: float, *, speed: float = 4.0) -> Course:
    """Fast at first, then slower."""
    return lambda share: last + (first - last) * math.exp(-speed * share)


def late(before: float, after: float, *, at: float = 0.6) -> Course:
    """`before` up to a share of the run, then straight to `after`."""
    return lambda share: before + (after - before) * max(0.0, share - at) / (1 - at)


HEALTHY: Mapping[str, tuple[Course, float]] = {
    "reward": (saturating(0.2, 0.8), 0.03),
    "loss": (line(0.0, 0.0), 0.01),
    "grad_norm": (line(0.5, 0.4), 0.08),
    "lr": (line(1e-6, 1e-6), 0.0),
    "entropy": (saturating(0.6, 0.35), 0.02),
    "diff_mean": (line(0.004, 0.005), 0.0005),
    "zero_variance": (line(0.35, 0.3), 0.05),
    "length": (line(220.0, 260.0), 12.0),
    "truncated": (line(0.04, 0.03), 0.01),
    "staleness": (line(0.0, 0.0), 0.0),
    "wasted": (line(0.0, 0.0), 0.0),
    "rollout_s": (line(6.0, 6.0), 0.4),
    "train_s": (line(5.0, 5.0), 0.2),
    "publish_s": (line(0.5, 0.5), 0.05),
    "save_s": (line(0.0, 0.0), 0.0),
    "accuracy": (saturating(0.2, 0.75), 0.0),
}
"""Figure -> what is expected of it, and its noise (standard deviation)."""
CHECK: Mapping[str, Any] = {
    "num_tokens": 256,
    "diff_mean": 0.004,
    "diff_max": 0.06,
    "bound_max": 0.2,
    "floor_mean": 0.004,
    "floor_max": 0.05,
    "kl": 4e-5,
    "floor_kl": 3e-5,
    "far": 0.0,
    "times": 1.1,
    "agreement": "equal",
}
"""Of engines that are right, in bfloat16."""
FIGURES = ("entropy", "kl", "ratio_mean", "clip_fraction")


@dataclass(kw_only=True)
class Planted:
    """A run to be."""

    steps: int = 80
    planned: int | None = None
    """Steps that it is to do, where that is more."""
    seed: int = 0
    courses: dict[str, tuple[Course, float]] = field(default_factory=dict)
    """What differs from HEALTHY; also kl, ratio_mean, clip_fraction, accept_length."""
    at_steps: dict[int, dict[str, float]] = field(default_factory=dict)
    """Single values."""
    eval_every: int = 10
    eval_prompts: int = 200
    eval_truncated: float = 0.0
    recipe: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    samples: list[KeptSample] = field(default_factory=list)
    first_samples: list[KeptSample] = field(default_factory=list)
    check: dict[str, Any] | None = None
    """What the check of engine and trainer found that is not in CHECK; None: it told of none."""
    lost: tuple[int, ...] = ()
    """Steps at which an engine died."""
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Course of each process's memory."""
    ends: bool = True
    error: dict[str, object] | None = None

    def events(self) -> Iterator[tuple[float, Event]]:
        """(seconds since 1970, event), as the run tells them."""
        now = BEGAN_S
        yield now, PhaseStarted(phase="start")
        if self.check is not None:
            yield now, EngineTrainerChecked(**{**CHECK, **self.check})
        yield now, PhaseStarted(phase="train")
        if self.eval_every:
            yield now, self._evaluation(0)
        draw = np.random.default_rng(self.seed)
        for step in range(1, self.steps + 1):
            told = self._figures(step, draw)
            done = self._step(step, told)
            now += done.seconds.step_s
            yield now, done
            if step in self.lost:
                own = {"worker": "engine 1", "step": step}
                yield now, WorkerLost(what="engine 1 died", why="signal 9", restart=1, **own)
                yield now, WorkerReplaced(seconds=1.0, **own)
            if self.eval_every and step % self.eval_every == 0:
                yield now, self._evaluation(step)
        if self.ends:
            outcome = "failed" if self.error else "done"
            yield now, RunEnded(outcome=outcome, step=self.steps, seconds=1.0, error=self.error)

    def history(self) -> History:
        """As a reader of its events has it."""
        return history_of(self.events())

    def facts(self) -> RunFacts:
        """Of a run on devices of its own: 4 engines, 4 trainer ranks."""
        plan = {
            "batch": {"updates_per_step": 1, "samples_per_prompt": 8},
            "max_staleness": 0,
            "precision": "bf16",
            "colocated": False,
            "device_kind": "cuda",
            "engines": {"num": 4, "tp": 1},
            "trainer": {"dp": 4},
        }
        return RunFacts(recipe={"train.ratio": "token", **self.recipe}, plan={**plan, **self.plan})

    def verdict(self, *, now_s: float | None = None) -> Verdict:
        """What is said of it."""
        return verdict_of(
            self.history(),
            facts=self.facts(),
            samples=self.samples,
            first_samples=self.first_samples,
            now_s=now_s,
            memory=self.memory,
        )

    def _figures(self, step: int, draw: np.random.Generator) -> dict[str, float]:
        share = (step - 1) / max(1, self.steps - 1)
        told = {
            name: course(share) + noise * draw.standard_normal()
            for name, (course, noise) in {**HEALTHY, **self.courses}.items()
        }
        for name in ("reward", "zero_variance", "truncated"):
            told[name] = min(max(told[name], 0.0), 1.0)
        return {**told, **self.at_steps.get(step, {})}

    def _evaluation(self, step: int) -> EvalDone:
        course, _ = {**HEALTHY, **self.courses}["accuracy"]
        return EvalDone(
            step=step,
            accuracy=course(step / self.steps),
            num_prompts=self.eval_prompts,
            truncated_fraction=self.eval_truncated,
            response_tokens_mean=200.0,
            seconds=2.0,
            path=f"eval/step_{step}.jsonl",
        )

    def _step(self, step: int, told: Mapping[str, float]) -> StepDone:
        phases = {name: told[name] for name in ("rollout_s", "train_s", "publish_s", "save_s")}
        seconds = PhaseSeconds(pack_s=0.1, step_s=sum(phases.values()) + 0.1, **phases)
        staleness = max(0.0, told["staleness"])
        return StepDone(
            step=step,
            num_steps=self.planned or self.steps,
            report=report_of(told),
            rollout=RolloutStats(
                num_groups=PROMPTS,
                num_samples=8 * PROMPTS,
                reward_mean=told["reward"],
                reward_std=0.4,
                zero_variance_fraction=told["zero_variance"],
                truncated_fraction=told["truncated"],
                response_tokens_mean=told["length"],
                response_tokens_max=int(2 * told["length"]),
                prompt_tokens_mean=60.0,
                staleness_mean=staleness,
                staleness_max=math.ceil(staleness),
                dropped_groups=0,
                generated_tokens=int(8 * PROMPTS * told["length"]),
                accept_length=told.get("accept_length"),
            ),
            seconds=seconds,
            version=step,
            rollout_tokens_per_s=8 * PROMPTS * told["length"] / seconds.rollout_s,
            train_tokens_per_s=8 * PROMPTS * told["length"] / seconds.train_s,
            publish=PublishStats(),
            flow=FlowStats(wasted_tokens=int(told["wasted"])),
        )


def report_of(told: Mapping[str, float]) -> StepReport:
    """Of one step."""
    return StepReport(
        loss=told["loss"],
        grad_norm=told["grad_norm"],
        lr=told["lr"],
        logprob_diff_mean=told["diff_mean"],
        logprob_diff_max=20 * told["diff_mean"],
        logprob_diff_tokens=0,
        num_tokens=30_000,
        num_loss_tokens=25_000,
        num_microbatches=4,
        forward_backward_s=4.0,
        optimizer_s=0.5,
        figures={name: told[name] for name in FIGURES if name in told},
    )


def history_of(events: Iterator[tuple[float, Event]]) -> History:
    """Fed as a reader of events.jsonl feeds it."""
    history = History(name="planted")
    for time_s, event in events:
        moment = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
        history.feed({"time": moment, **to_record(event)})
    return history


def row_events(
    loss: Course, held_out: Course, *, steps: int = 60, seed: int = 0
) -> Iterator[tuple[float, Event]]:
    """Of a run that learns from rows, with a validation every five steps."""
    draw = np.random.default_rng(seed)
    yield BEGAN_S, PhaseStarted(phase="start")
    for step in range(1, steps + 1):
        share = (step - 1) / (steps - 1)
        told = {"grad_norm": 1.0, "lr": 1e-5, "diff_mean": 0.0, "entropy": 0.5}
        told["loss"] = loss(share) + 0.05 * draw.standard_normal()
        yield (
            BEGAN_S + step,
            RowStepDone(
                step=step,
                num_steps=steps,
                epoch=3 * share,
                report=report_of(told),
                pack_s=0.1,
                train_s=0.8,
                save_s=0.0,
                step_s=1.0,
                tokens_per_s=3e4,
            ),
        )
        if step % 5 == 0:
            held = ValidationDone(step=step, loss=held_out(share), num_rows=100, seconds=1.0)
            yield BEGAN_S + step, held


def rows_history(loss: Course, held_out: Course) -> History:
    """The same as a reader of its events has it."""
    return history_of(row_events(loss, held_out))


def sample(
    step: int, prompt_index: int, response: str, *, versions: tuple[int, ...] = (1,), **more: Any
) -> KeptSample:
    """One that was kept."""
    record = {"versions": list(versions), **more}
    return KeptSample(
        step=step,
        prompt_index=prompt_index,
        prompt=f"What is {prompt_index} + {prompt_index}?",
        response=response,
        reward=1.0,
        stop_reason="stop",
        record=record,
    )
