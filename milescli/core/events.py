"""The events of a run. Observers (table, files, trackers) receive them; they never steer the
run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from milescli.core.types import StepReport
from milescli.core.units import format_duration, format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted:
    """Reports that the run enters a phase: start, warmup, check, train, eval, save, stop."""

    phase: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Reports something to the user; `level` is info or warning."""

    text: str
    level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStepDone:
    """Reports one supervised step of the warm-up."""

    step: int
    num_steps: int
    report: StepReport
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """Holds what the collector measured while it collected one step's groups."""

    num_groups: int
    num_samples: int
    reward_mean: float
    reward_std: float
    zero_variance_fraction: float
    """Share of groups in which all rewards are equal: they have no gradient."""
    truncated_fraction: float
    response_tokens_mean: float
    response_tokens_max: int
    prompt_tokens_mean: float
    staleness_mean: float
    """Trainer version minus the version of the oldest token, measured when the step took the
    group."""
    staleness_max: int
    dropped_groups: int
    """Number of groups that the filter refused."""
    generated_tokens: int
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """If `rollout.reward` names several: the mean of each, before its weight."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Mean of each metric that agents report (turns, tool calls, seconds, ...)."""
    accept_length: float | None = None
    """Mean tokens that one pass of the model yields with speculative decoding
    (`rollout.speculative`), over all passes; None: it is off."""
    accept_rate: float | None = None
    """Share of the guesses that are right."""
    skipped_prompts: int = 0
    """Number of prompts skipped since this process began because they are longer than
    `data.max_prompt_tokens`; only for files too large to be tokenised at the start."""
    reward_histogram: tuple[int, ...] = ()
    """[12] number of groups by mean reward, refused ones included: exactly 0, above 0 and below
    0.1, from 0.1 and below 0.2, ..., from 0.9 and below 1, exactly 1. Empty if a reward is not
    within 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Holds the seconds of one step, by phase."""

    rollout_s: float
    """Time for which the trainer waited for groups; generation that overlaps training does not
    count."""
    pack_s: float
    train_s: float
    publish_s: float
    save_s: float
    step_s: float
    """Total."""


PHASES = ("rollout", "pack", "train", "save", "publish")
"""Phases of a step, in the order in which the loop runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStats:
    """Describes what one update of the engines' weights did to the running requests."""

    num_running: int = 0
    """Requests without a reply when the update began."""
    wait_s: float = 0.0
    """Seconds until no request was running, if `rollout.on_update` waits for them."""
    discarded_tokens: int = 0
    """Tokens of responses that were discarded since the previous publish, by
    `rollout.on_update=abort` or by their caller; tokens that an engine has made since then and not
    sent are not included."""
    sent_bytes: int = 0
    """Bytes of weights that all trainer ranks sent."""
    retractions: int = 0
    """Times since the previous publish that an engine's KV cache was full, and the engine discarded
    the cache of a running response, to recompute it later."""
    held_requests: int = 0
    """Most requests that were held back since the previous publish, because engines could not run
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStats:
    """Describes how rollout and training overlapped since the previous step."""

    idle_s: float = 0.0
    """Seconds in which no sample was generated: rollout was held back."""
    running_mean: float = 0.0
    """Mean number of samples in generation, over time."""
    waiting_groups: int = 0
    """Scored groups that the step did not use, and that wait for the next."""
    stale_groups: int = 0
    """Groups that were given up because they would have been older than `rollout.max_staleness`
    allows."""
    wasted_tokens: int = 0
    """Tokens of the finished samples of those groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Reports one RL step."""

    step: int
    """Counted from 1: the number of optimizer steps done."""
    num_steps: int
    report: StepReport
    rollout: RolloutStats
    seconds: PhaseSeconds
    version: int
    rollout_tokens_per_s: float
    train_tokens_per_s: float
    publish: PublishStats = PublishStats()
    """Statistics of publishing the step's weights."""
    flow: FlowStats = FlowStats()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStepDone:
    """Reports one step of a run that trains on rows of a file."""

    step: int
    """Counted from 1: the number of optimizer steps done."""
    num_steps: int
    epoch: float
    """Passes over the rows so far."""
    report: StepReport
    pack_s: float
    train_s: float
    save_s: float
    step_s: float
    """Total."""
    tokens_per_s: float
    """Trained tokens, prompts included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationDone:
    """Reports the loss on held-out rows, measured without training."""

    step: int
    loss: float
    num_rows: int
    seconds: float
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the objective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDone:
    """Reports one evaluation on the held-out prompts."""

    step: int
    accuracy: float
    """Mean reward over prompts and samples."""
    num_prompts: int
    truncated_fraction: float
    response_tokens_mean: float
    seconds: float
    path: str
    """File with the samples, relative to the run directory."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics from `eval.metrics`, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """Reports that a checkpoint is complete (its manifest was written)."""

    step: int
    path: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMirrored:
    """Reports that a complete copy of a checkpoint is in the object store."""

    step: int
    url: str
    size_bytes: int
    """Bytes that were sent."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrainerChecked:
    """Reports that engine and trainer scored the same samples before the first step."""

    num_tokens: int
    diff_mean: float
    """Mean of |engine - trainer| over the sampled tokens, in nats."""
    diff_max: float
    bound_max: float
    """Bound beyond which the largest difference of a later step is highlighted."""
    floor_mean: float
    """Like `diff_mean`, but between the trainer and itself with its layers rounded in another way.
    """
    floor_max: float
    kl: float
    """KL between engine and trainer, in nats per token."""
    floor_kl: float
    far: float
    """Share of tokens whose ratio is outside of [1/2, 2]."""
    times: float
    """The difference as a multiple of the effect of rounding on the trainer."""
    agreement: str
    """equal, or explained: further apart than rounding alone explains, but not more than the
    routing of experts may. A run whose engines are wrong does not start."""
    correction: str = ""
    """What the run does about a difference that is explained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSilent:
    """Reports that a process of the run has not responded for a while; after `limit_s` it counts as
    dead."""

    worker: str
    """Its name in errors: engine 1."""
    why: str
    """The observed symptom."""
    step: int
    """Number of steps done."""
    seconds: float
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """Reports that a process of the run died or hung, and is being replaced."""

    worker: str
    """Its name in errors: engine 1."""
    what: str
    why: str
    """The cause, with the last lines of its log."""
    step: int
    """Number of steps done."""
    restart: int
    """Counted from 1, over the run's attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReplaced:
    """Reports that a new process has replaced the dead one."""

    worker: str
    step: int
    """Number of steps done."""
    seconds: float
    """Seconds since the loss was noticed."""
    source: str = ""
    """What trainer ranks restarted from, and which work they repeated."""
    lost_samples: int = 0
    """Complete samples that are in no journal, and are sampled again."""

    @property
    def sentence(self) -> str:
        """Return the event in words."""
        text = f"{self.worker} is back after {format_duration(self.seconds)}"
        return f"{text}, {self.source}" if self.source else text


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictGiven:
    """Reports whether the run is learning and what is wrong with it; sent when that changes."""

    step: int
    """Number of steps done."""
    headline: str
    is_learning: bool | None
    """None: too early to say, or little is left to learn."""
    findings: Mapping[str, str] = field(default_factory=dict)
    """Name -> evidence of each finding that is more than a hint; the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Memory of one process, or one device, in a step, in bytes."""

    worker: str
    """Its name in errors: trainer rank 0."""
    device: str
    """cuda:0, or cpu."""
    peak_bytes: int
    """Peak of tensors in the step; on a CPU, peak of resident memory of the process, for an engine
    as of the last look at it."""
    reserved_bytes: int | None = None
    """Peak that torch reserved for tensors; None on a CPU."""
    used_bytes: int | None = None
    """Bytes that all processes use of the whole device, at the end of the step; None on a CPU."""
    total_bytes: int | None = None
    """Capacity of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """Reports the memory of processes in a step, if it has changed, for comparison with the
    plan."""

    step: int
    workers: tuple[WorkerMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """Reports the end of an attempt: its last event."""

    outcome: str
    """done, stopped or failed."""
    step: int
    seconds: float
    error: dict[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEvent:
    """Wraps an event of one of several adapters, in the events of the run that trains them."""

    adapter: str
    event: Event


Event = (
    PhaseStarted
    | Notice
    | WarmupStepDone
    | StepDone
    | RowStepDone
    | ValidationDone
    | EvalDone
    | CheckpointSaved
    | CheckpointMirrored
    | EngineTrainerChecked
    | WorkerSilent
    | WorkerLost
    | WorkerReplaced
    | VerdictGiven
    | MemorySeen
    | RunEnded
    | AdapterEvent
)


@dataclass(slots=True)
class EventBus:
    """Passes each event to every listener."""

    listeners: list[Callable[[Event], None]] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        """Pass the event to every listener, in the order of emission. The loop calls it."""
        for listener in self.listeners:
            listener(event)


def stamped(event: Event) -> dict[str, object]:
    """Return a line of events.jsonl: the event with its time, 2026-11-25T22:00:01.234Z."""
    return {"time": format_time(time.time()), **to_record(event)}


def to_record(event: Event) -> dict[str, object]:
    """Return the JSON form: the class name under `event`, then the fields; for an adapter's event
    those of the inner event, with `adapter`."""
    if isinstance(event, AdapterEvent):
        return {**to_record(event.event), "adapter": event.adapter}
    return {"event": type(event).__name__, **asdict(event)}
