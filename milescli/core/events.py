"""What happens in a run, as it happens. Events are observed (table, files, trackers) and never
steer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from milescli.core.types import StepReport
from milescli.core.units import format_duration, format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted:
    """The run enters a phase: start, warmup, check, train, eval, save, stop."""

    phase: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Reports something to the user; `level` is info or warning."""

    text: str
    level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStepDone:
    """One supervised step of the warm-up."""

    step: int
    num_steps: int
    report: StepReport
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """What the collector saw while it gathered one step's groups."""

    num_groups: int
    num_samples: int
    reward_mean: float
    reward_std: float
    zero_variance_fraction: float
    """Share of groups in which all rewards are equal: they teach nothing."""
    truncated_fraction: float
    response_tokens_mean: float
    response_tokens_max: int
    prompt_tokens_mean: float
    staleness_mean: float
    """Trainer version minus the version of the oldest token, measured when the step took the
    group."""
    staleness_max: int
    dropped_groups: int
    """Refused by the filter."""
    generated_tokens: int
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Where `rollout.reward` names several: the mean of each, before its weight."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What agents tell of their episodes (turns, tool calls, seconds, ...): the mean of each."""
    accept_length: float | None = None
    """Tokens that one pass of the model makes over what was guessed (`rollout.speculative`), of
    all passes; None: nothing is guessed."""
    accept_rate: float | None = None
    """Share of the guesses that are right."""
    skipped_prompts: int = 0
    """Passed over since this process began, for being longer than `data.max_prompt_tokens`; of
    files too large to be tokenised at the start."""
    reward_histogram: tuple[int, ...] = ()
    """[12] groups by their mean reward, refused ones included: exactly 0, above 0 and below 0.1,
    from 0.1 and below 0.2, ..., from 0.9 and below 1, exactly 1. Empty where a reward is not within
    0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Where one step's time went, seconds."""

    rollout_s: float
    """Waiting for groups, as the trainer saw it; overlapped generation does not count."""
    pack_s: float
    train_s: float
    publish_s: float
    save_s: float
    step_s: float
    """All together."""


PHASES = ("rollout", "pack", "train", "save", "publish")
"""Phases of a step, in the order in which the loop runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStats:
    """What one change of the engines' weights did to the requests that were running."""

    num_running: int = 0
    """Requests that the engines had not replied to when it began."""
    wait_s: float = 0.0
    """Seconds until none was running any more: the drain, where `rollout.on_update` says so."""
    discarded_tokens: int = 0
    """Tokens of responses that were discarded since the previous publish, by
    `rollout.on_update=abort` or by their caller; tokens that an engine has made since then and not
    sent are not included."""
    sent_bytes: int = 0
    """Bytes of weights that all trainer ranks sent."""
    retractions: int = 0
    """Times since the previous publish that an engine's KV cache was full, and it discarded that of
    a running response, to compute it again later."""
    held_requests: int = 0
    """Most requests that were held back since then, because engines could not run them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStats:
    """Reports how rollout and training interleaved since the step before."""

    idle_s: float = 0.0
    """Seconds in which no sample was being made: rollout was held back."""
    running_mean: float = 0.0
    """Samples that were being made, mean over the time."""
    waiting_groups: int = 0
    """Scored groups that were left when the step had its own."""
    stale_groups: int = 0
    """Given up, as they would have been older than `rollout.max_staleness` allows."""
    wasted_tokens: int = 0
    """Tokens of the finished samples of those groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One RL step."""

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
    """One step of a run that learns from rows of a file."""

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
    """All together."""
    tokens_per_s: float
    """Trained tokens, prompts included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationDone:
    """The loss on held-out rows, without a step."""

    step: int
    loss: float
    num_rows: int
    seconds: float
    figures: Mapping[str, float] = field(default_factory=dict)
    """What the objective tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDone:
    """One evaluation on the held-out prompts."""

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
    """What `eval.metrics` says, by its names."""


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
    """Engine and trainer scored the same samples before the first step."""

    num_tokens: int
    diff_mean: float
    """Mean of |engine - trainer| over the sampled tokens, in nats."""
    diff_max: float
    bound_max: float
    """Beyond which a later step's largest difference is marked."""
    floor_mean: float
    """As `diff_mean`, of the trainer against itself when its layers are rounded otherwise."""
    floor_max: float
    kl: float
    """KL between engine and trainer, in nats per token."""
    floor_kl: float
    far: float
    """Share of tokens whose ratio is outside of [1/2, 2]."""
    times: float
    """How many times as far apart they are as rounding moves the trainer from itself."""
    agreement: str
    """equal, or explained: further apart than rounding alone, as the routing of experts explains.
    A run whose engines are wrong does not start."""
    correction: str = ""
    """What is done about a difference that is explained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSilent:
    """Reports that a process of the run has not responded for a while; after `limit_s` it counts as
    dead."""

    worker: str
    """As errors call it: engine 1."""
    why: str
    """What was seen of it."""
    step: int
    """Steps done."""
    seconds: float
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """Reports that a process of the run died or hung, and is being replaced."""

    worker: str
    """As errors call it: engine 1."""
    what: str
    why: str
    """With the last lines of its log."""
    step: int
    """Steps done."""
    restart: int
    """Counted from 1, over the run's attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReplaced:
    """The new process does what the dead one did."""

    worker: str
    step: int
    """Steps done."""
    seconds: float
    """Since the loss was noticed."""
    source: str = ""
    """What trainer ranks began from, and what they did again."""
    lost_samples: int = 0
    """Complete samples that no journal has, and that are sampled again."""

    @property
    def sentence(self) -> str:
        """Return it in words."""
        text = f"{self.worker} is back after {format_duration(self.seconds)}"
        return f"{text}, {self.source}" if self.source else text


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictGiven:
    """Reports whether the run is learning and what is wrong with it; sent when that changes."""

    step: int
    """Steps done."""
    headline: str
    is_learning: bool | None
    """None: too early to say, or little is left to learn."""
    findings: Mapping[str, str] = field(default_factory=dict)
    """Name of each that is more than a hint -> what was seen; the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """What one process, or one device, held in a step, bytes."""

    worker: str
    """As errors call it: trainer rank 0."""
    device: str
    """cuda:0, or cpu."""
    peak_bytes: int
    """Most that tensors took in the step; on a CPU, most that was ever resident, or for
    an engine there what was when it was last seen."""
    reserved_bytes: int | None = None
    """Most that torch held for them; None on a CPU."""
    used_bytes: int | None = None
    """Bytes that all processes use of the whole device, at the end of the step; None on a CPU."""
    total_bytes: int | None = None
    """That the device has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """Reports the memory of processes in a step, if it has changed; the plan says what it counted
    on."""

    step: int
    workers: tuple[WorkerMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The last event of every attempt."""

    outcome: str
    """done, stopped or failed."""
    step: int
    seconds: float
    error: dict[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfAdapter:
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
    | OfAdapter
)


@dataclass(slots=True)
class EventBus:
    """Hands each event to every listener."""

    listeners: list[Callable[[Event], None]] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        """Called by the loop; order is the order of emission."""
        for listener in self.listeners:
            listener(event)


def stamped(event: Event) -> dict[str, object]:
    """Return a line of events.jsonl: the event with its time, 2026-11-25T22:00:01.234Z."""
    return {"time": format_time(time.time()), **to_record(event)}


def to_record(event: Event) -> dict[str, object]:
    """The JSON form: the class name under `event`, then the fields; of an adapter's event its own,
    with `adapter`."""
    if isinstance(event, OfAdapter):
        return {**to_record(event.event), "adapter": event.adapter}
    return {"event": type(event).__name__, **asdict(event)}
