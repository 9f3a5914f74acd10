"""How far a run has come: events in, the figures that a screen shows out. Pure; drawn by
`panel` and `lines`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from milescli.core.events import (
    CheckpointSaved,
    EngineTrainerChecked,
    EvalDone,
    Event,
    OfAdapter,
    PhaseStarted,
    RowStepDone,
    RunEnded,
    StepDone,
    ValidationDone,
    VerdictGiven,
    WarmupStepDone,
)

KEPT_STEPS = 64
"""Steps whose full figures are kept; a screen shows fewer."""
ETA_STEPS = 10
"""The time that is left is estimated by the mean of so many last steps."""


@dataclass(slots=True, kw_only=True)
class RunProgress:
    """Grows with each event."""

    name: str
    """Of the run."""
    clock: Callable[[], float] = time.monotonic
    """Seconds; another one in tests."""
    began: float = 0.0
    phase: str = "start"
    detail: str = ""
    before: tuple[str, str] = ("start", "")
    """Phase and detail that an evaluation interrupted."""
    steps: deque[StepDone] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    rewards: list[float] = field(default_factory=list)
    """[num RL steps seen] mean reward of each, for the sparkline."""
    warmup: WarmupStepDone | None = None
    """The last warm-up step."""
    warmup_losses: list[float] = field(default_factory=list)
    row_step: RowStepDone | None = None
    """The last step of a run that learns from rows."""
    losses: list[float] = field(default_factory=list)
    """[row steps seen]"""
    row_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=ETA_STEPS))
    validations: list[ValidationDone] = field(default_factory=list)
    evals: list[EvalDone] = field(default_factory=list)
    checkpoint: CheckpointSaved | None = None
    check: EngineTrainerChecked | None = None
    verdict: VerdictGiven | None = None
    """The newest."""
    ended: RunEnded | None = None
    adapters: dict[str, RunProgress] = field(default_factory=dict)
    """Of a run of several: how far each has come, by its name."""

    def __post_init__(self) -> None:
        self.began = self.clock()

    def feed(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, OfAdapter):
            self._feed_adapter(event.adapter, event.event)
        elif isinstance(event, PhaseStarted):
            if event.phase == "eval":
                self.before = self.phase, self.detail
            self.phase, self.detail = event.phase, event.detail
        elif isinstance(event, StepDone):
            self.steps.append(event)
            self.rewards.append(event.rollout.reward_mean)
        elif isinstance(event, WarmupStepDone):
            self.warmup = event
            self.warmup_losses.append(event.report.loss)
        elif isinstance(event, RowStepDone):
            self.row_step = event
            self.losses.append(event.report.loss)
            self.row_seconds.append(event.step_s)
        elif isinstance(event, ValidationDone):
            self.validations.append(event)
        elif isinstance(event, EvalDone):
            self.evals.append(event)
            if self.phase == "eval":
                self.phase, self.detail = self.before
        elif isinstance(event, CheckpointSaved):
            self.checkpoint = event
        elif isinstance(event, EngineTrainerChecked):
            self.check = event
        elif isinstance(event, VerdictGiven):
            self.verdict = event
        elif isinstance(event, RunEnded):
            self.ended = event

    def _feed_adapter(self, name: str, event: Event) -> None:
        if name not in self.adapters:
            self.adapters[name] = RunProgress(name=name, clock=self.clock)
        self.adapters[name].feed(event)
        if isinstance(event, PhaseStarted):
            self.phase, self.detail = event.phase, f"{name}: {event.detail}"

    @property
    def last(self) -> StepDone | None:
        """The newest RL step."""
        return self.steps[-1] if self.steps else None

    @property
    def is_warming_up(self) -> bool:
        """Supervised steps are shown, because no RL step was done yet."""
        return self.warmup is not None and not self.steps

    @property
    def elapsed_s(self) -> float:
        """Since the start of this attempt; stands still at its end."""
        return self.ended.seconds if self.ended else self.clock() - self.began

    @property
    def share_done(self) -> float | None:
        """Of the RL steps, or of the warm-up while there is none; None where nothing was counted
        yet."""
        if self.last is not None:
            return self.last.step / self.last.num_steps
        if self.row_step is not None:
            return self.row_step.step / self.row_step.num_steps
        return self.warmup.step / self.warmup.num_steps if self.warmup else None

    @property
    def left_s(self) -> float | None:
        """An estimate by the last steps; None where there is none to go by, or nothing is left."""
        if self.row_step is not None and not self.ended:
            mean = sum(self.row_seconds) / len(self.row_seconds)
            return mean * (self.row_step.num_steps - self.row_step.step) or None
        recent = list(self.steps)[-ETA_STEPS:]
        if self.ended or not recent or recent[-1].step >= recent[-1].num_steps:
            return None
        mean = sum(step.seconds.step_s for step in recent) / len(recent)
        return mean * (recent[-1].num_steps - recent[-1].step)

    def accuracy_at(self, step: int) -> float | None:
        """Of the evaluation after this step."""
        return next((done.accuracy for done in reversed(self.evals) if done.step == step), None)
