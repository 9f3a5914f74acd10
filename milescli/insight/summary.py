"""Summarizes a run on one screen: progress, accuracy, speed, where the time goes, idle times,
memory, and the verdict. `miles status` shows it, `--json` prints it, and the page begins with it.
Reads; writes nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.run_lock import state_of
from milescli.core.events import PHASES
from milescli.core.history import History
from milescli.insight import series
from milescli.insight.case import Verdict
from milescli.insight.facts import RunFacts
from milescli.insight.memory import DeviceMemory, memory_of
from milescli.insight.timeline import of_run
from milescli.insight.verdict import read_verdict
from milescli.models.costs import TokenFlops
from milescli.plan.devices import DEVICES
from milescli.recipe.section import of_type

SPREAD = 1.645
"""Standard errors on either side of the remaining time: nine of ten runs end in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """Holds an estimate of the seconds to the end, from the newest steps, evaluations included."""

    low_s: float
    mean_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Holds the first, last and best value of a metric."""

    first: float
    """Value at the first step that has one."""
    last: float
    best: float
    best_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Describes a part of a step, or of a run."""

    name: str
    seconds: float
    """Mean over the newest steps; for a run, the total."""
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Describes the time in which a part of the run was idle."""

    who: str
    for_whom: str
    seconds: float
    """Seconds per step, mean over the newest ones."""
    share: float
    """Fraction of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Holds the content of a run's screen."""

    name: str
    state: str
    """State of the run, as `state_of` returns it."""
    phase: str
    phase_detail: str
    phase_s: float | None
    """Seconds since the phase began; None if the run is not running."""
    step: int
    num_steps: int | None
    share_done: float | None
    elapsed_s: float | None
    """Seconds of all attempts, without the pauses between them, until now or until the end."""
    left: TimeLeft | None
    """None: the run has ended, or no estimate is possible."""
    learns_from_rows: bool
    reward: Course | None
    loss: Course | None
    accuracy: Course | None
    """Accuracy on held-out prompts."""
    rollout_tokens_per_s: float | None
    """Mean over the newest steps."""
    train_tokens_per_s: float | None
    mfu: float | None
    """Model FLOPs of training as a share of the devices' peak; None if either is unknown, as on a
    CPU."""
    phases: Sequence[Phase]
    """Seconds of a step by phase."""
    run_phases: Sequence[Phase]
    """Seconds of all attempts by phase: start, warmup, train, eval, ...; the longest first."""
    staleness_mean: float | None
    staleness_max: int | None
    waits: Sequence[Wait]
    memory: Sequence[DeviceMemory]
    restarts: int
    lost_samples: int
    """Complete samples that were lost with a process, and sampled again."""
    checkpoint_step: int | None
    mirror: str | None
    """URL to which checkpoints are copied; None: nowhere."""
    mirrored_step: int | None
    """Step of the newest checkpoint whose copy is complete."""
    last_s: float | None
    """Time of its newest event, seconds since 1970."""
    verdict: Verdict
    adapters: Sequence[str] = ()
    """Names of the adapters, if the run trains several."""
    forked_from: str = ""
    """`RUN @ step N` of the run that a fork began with."""


def summarize(
    run: RunDir, history: History, facts: RunFacts, *, now_s: float | None = None
) -> Summary:
    """Summarize the current state of the run."""
    now_s = time.time() if now_s is None else now_s
    state = state_of(run, outcome=history.outcome)
    is_running = state == "running"
    shown = representative_history(history)
    return Summary(
        name=run.full_name,
        state=state,
        phase=history.phase,
        phase_detail=history.phase_detail,
        phase_s=_since(history.phase_s, now_s) if is_running else None,
        step=shown.step,
        num_steps=shown.num_steps or facts.plan.get("steps") or facts.count("train.steps") or None,
        share_done=shown.share_done,
        elapsed_s=_since(
            history.began_s - history.earlier_s, now_s if is_running else history.last_s
        ),
        left=_left(shown, facts) if is_running else None,
        learns_from_rows=shown.learns_from_rows,
        reward=_course(shown, "rollout/reward_mean"),
        loss=_course(shown, "train/loss", is_better=min),
        accuracy=_accuracy(shown),
        rollout_tokens_per_s=_recent(shown, "speed/rollout_tokens_per_s"),
        train_tokens_per_s=_recent(shown, "speed/train_tokens_per_s"),
        mfu=mfu_of(shown, facts),
        phases=phases_of(shown),
        run_phases=run_phases_of(history),
        staleness_mean=_recent(shown, "rollout/staleness_mean"),
        staleness_max=_most(shown, "rollout/staleness_max"),
        waits=_waits(shown),
        memory=memory_of(run, history, facts),
        restarts=history.restarts,
        lost_samples=sum(healing.lost_samples for healing in history.healings),
        checkpoint_step=_saved(history, run),
        mirror=facts.key("checkpoint.mirror"),
        mirrored_step=max(_steps_of(history, "CheckpointMirrored"), default=None),
        last_s=None if math.isnan(history.last_s) else history.last_s,
        verdict=read_verdict(
            run, history, facts=facts, now_s=now_s if is_running else None, state=state
        ),
        adapters=tuple(history.adapters),
        forked_from=facts.forked_from,
    )


def representative_history(history: History) -> History:
    """Return the history whose metrics represent the run: its own; with several adapters, that of
    the one with the fewest steps."""
    if not history.adapters:
        return history
    return min(history.adapters.values(), key=lambda own: own.share_done or 0.0)


def phases_of(history: History) -> list[Phase]:
    """Return the phases of the newest steps, in the order of a step; phases without time are left
    out."""
    step_s = _recent(history, "time/step_s")
    if not step_s:
        return []
    parts = [(name, _recent(history, f"time/{name}_s") or 0.0) for name in PHASES]
    return [Phase(name=name, seconds=spent, share=spent / step_s) for name, spent in parts if spent]


def run_phases_of(history: History) -> list[Phase]:
    """Return how long the run was in each of its phases; `share` is of all attempts together."""
    spent = dict[str, float]()
    for one in of_run(history):
        spent[one.what] = spent.get(one.what, 0.0) + one.end_s - one.begin_s
    whole = sum(spent.values())
    longest = sorted(spent.items(), key=lambda item: -item[1])
    return [Phase(name=name, seconds=seconds, share=seconds / whole) for name, seconds in longest]


def _left(history: History, facts: RunFacts) -> TimeLeft | None:
    seconds = series.recent(history.columns.get("time/step_s"))
    if not len(seconds) or not history.num_steps or history.step >= history.num_steps:
        return None
    count = history.num_steps - history.step
    every = facts.count("eval.every")
    evals = [one.seconds for one in history.evaluations[-5:]]
    beside = np.mean(evals) * (count // every) if evals and every else 0.0
    mean_s = float(seconds.mean()) * count + float(beside)
    # the mean of the steps is not sure, and those to come differ as those that were
    deviation = float(seconds.std(ddof=1)) if len(seconds) > 1 else 0.0
    error = deviation * math.sqrt(count + count * count / len(seconds))
    low, high = mean_s - SPREAD * error, mean_s + SPREAD * error
    return TimeLeft(low_s=max(0.0, low), mean_s=mean_s, high_s=high)


def _course(history: History, name: str, *, is_better: Callable[..., int] = max) -> Course | None:
    values = np.frombuffer(history.columns.get(name), dtype=np.float64)
    places = np.flatnonzero(np.isfinite(values))
    if not len(places):
        return None
    best = is_better(places, key=lambda place: values[place])
    steps = history.columns.steps
    return Course(
        first=float(values[places[0]]),
        last=float(values[places[-1]]),
        best=float(values[best]),
        best_step=steps[best],
        last_step=steps[places[-1]],
    )


def _accuracy(history: History) -> Course | None:
    found = history.evaluations
    if not found:
        return None
    best = max(found, key=lambda one: one.accuracy)
    return Course(
        first=found[0].accuracy,
        last=found[-1].accuracy,
        best=best.accuracy,
        best_step=best.step,
        last_step=found[-1].step,
    )


def _waits(history: History) -> list[Wait]:
    step_s = _recent(history, "time/step_s")
    if not step_s:
        return []
    waits = (
        ("trainer", "rollout: samples to learn from", _recent(history, "time/rollout_s")),
        ("rollout", "training and publishing", _recent(history, "flow/idle_s")),
        ("publish", "running samples to end", _recent(history, "publish/wait_s")),
    )
    return [
        Wait(who=who, for_whom=whom, seconds=seconds, share=seconds / step_s)
        for who, whom, seconds in waits
        if seconds and seconds > 0.01 * step_s
    ]


def _recent(history: History, name: str) -> float | None:
    mean = series.mean(series.recent(history.columns.get(name)))
    return None if math.isnan(mean) else mean


def _most(history: History, name: str) -> int | None:
    values = series.finite(history.columns.get(name))
    return int(values.max()) if len(values) else None


def _since(began_s: float, now_s: float) -> float | None:
    return None if math.isnan(began_s) or math.isnan(now_s) else max(0.0, now_s - began_s)


def _saved(history: History, run: RunDir) -> int | None:
    own = _steps_of(history, "CheckpointSaved")
    for name, adapter in history.adapters.items():
        if (step := _saved(adapter, RunDir(run.adapters_dir / name))) is not None:
            own.append(step)
    return max(own, default=None)


def _steps_of(history: History, kind: str) -> list[int]:
    return [one.step for one in history.notices if one.kind == kind and one.step is not None]


FORWARD_AND_BACKWARD = 3
"""Cost of a trained token in forward passes: Chowdhery et al. (PaLM), arXiv 2204.02311, appendix B;
recomputation does not count."""


def mfu_of(history: History, facts: RunFacts) -> float | None:
    """Return the model FLOPs utilization of the newest steps, 0 to 1; None if unknown."""
    costs, device = facts.manifest.get("token_flops"), facts.plan.get("forecast") or {}
    spec = next(
        (one for one in DEVICES.values() if one.name in str(device.get("device", ""))), None
    )
    if not isinstance(costs, dict) or spec is None:
        return None
    columns = history.columns
    tokens = series.mean(series.recent(columns.get("train/num_tokens")))
    seconds = series.mean(series.recent(columns.get("time/train_s")))
    length = _mean_length(history)
    if not (tokens > 0 and seconds > 0 and length > 0):
        return None
    try:
        of_token = of_type(TokenFlops, asdict(TokenFlops(**costs)))
    except (TypeError, ValueError):  # another version of miles wrote them, or they are damaged
        return None
    flops = FORWARD_AND_BACKWARD * of_token.forward_mean(max(1, round(length)))
    can_do = spec.bf16_flops * facts.num_trainer_devices
    return tokens * flops / (seconds * can_do)


def _mean_length(history: History) -> float:
    """Return the mean number of tokens of a sequence, prompt and response."""
    parts = ("rollout/prompt_tokens_mean", "rollout/response_tokens_mean")
    return sum(series.mean(series.recent(history.columns.get(part))) for part in parts)
