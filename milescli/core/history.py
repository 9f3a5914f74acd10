"""Everything that a run has reported: built from the records of events.jsonl, from the beginning of
the first attempt. Pure; `reader` reads the file, and a running driver feeds its own records."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from milescli.core.scalars import Record, scalars_in
from milescli.core.units import format_bytes, parse_time

EVAL = "eval"
"""Phase of evaluations, on held-out prompts or rows."""
EVALUATED = ("EvalDone", "ValidationDone")
"""Events that end an evaluation."""


class Columns:
    """Holds metrics by step, ascending: each column has a number or NaN for every step."""

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.times: array[float] = array("d")
        """[steps] when each was done, seconds since 1970; NaN where that is not known."""
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __getitem__(self, name: str) -> array[float]:
        """Return [steps] values, NaN for a step without one. Raises KeyError if no step has one."""
        return self._padded(self._columns[name])

    def get(self, name: str) -> array[float]:
        """Return the values as `[name]` does; all NaN if no step has one."""
        return self[name] if name in self else array("d", [math.nan]) * len(self)

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of each step that has a finite one."""
        pairs = zip(self.steps, self.get(name), strict=True)
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    def row(self, place: int) -> dict[str, float]:
        """Return the metrics of the step at an index, which counts from the end if it is negative;
        metrics that no step has are left out."""
        return {name: self[name][place] for name in self}

    def add(self, step: int, figures: Mapping[str, float], *, time_s: float = math.nan) -> None:
        """Append a step's metrics. If the step exists, it and all later steps are dropped first: a
        resumed run repeats them."""
        if self.steps and step <= self.steps[-1]:
            self._cut(bisect_left(self.steps, step))
        place = len(self.steps)
        self.steps.append(step)
        self.times.append(time_s)
        for name, value in figures.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d")
            if len(column) < place:
                column.extend([math.nan] * (place - len(column)))
            column.append(value)

    def _cut(self, length: int) -> None:
        for values in (self.steps, self.times, *self._columns.values()):
            del values[length:]

    def _padded(self, column: array[float]) -> array[float]:
        if missing := len(self) - len(column):
            column.extend([math.nan] * missing)
        return column


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Holds one evaluation on held-out prompts: an EvalDone."""

    step: int
    accuracy: float
    num_prompts: int
    time_s: float
    """When it was done, seconds since 1970."""
    seconds: float
    path: str
    """Path of its samples, relative to the run directory."""
    figures: dict[str, float]
    """Its other scalars: truncated_fraction, response_tokens_mean, those of `eval.metrics`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Holds one loss on held-out rows: a ValidationDone."""

    step: int
    loss: float
    seconds: float
    figures: dict[str, float]


@dataclass(slots=True, kw_only=True)
class WorkerLossRecord:
    """Records the loss of a process, and its replacement."""

    worker: str
    """engine 1"""
    what: str
    step: int
    lost_s: float
    """Seconds since 1970."""
    replaced_s: float | None = None
    """None: not yet, or never."""
    source: str = ""
    """What ranks restarted from."""
    lost_samples: int = 0
    """Complete samples that were lost with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeEntry:
    """Records something that happened at one time: a notice, a phase, a checkpoint, a silence, an
    end."""

    time_s: float
    """Seconds since 1970."""
    kind: str
    """The event's class: Notice, PhaseStarted, ..."""
    text: str
    level: str = "info"
    """info, warning or error."""
    seconds: float = 0.0
    """Seconds that it has taken so far."""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Records a phase of the run from one time to another, in seconds since 1970."""

    phase: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class CurrentPhase:
    """Follows the phase that a run is in. An evaluation interrupts a phase, which goes on after it:
    PhaseStarted begins one, EvalDone or ValidationDone ends it."""

    name: str = ""
    detail: str = ""
    _interrupted: tuple[str, str] = ("", "")

    def begin(self, name: str, detail: str = "") -> None:
        """Enter a phase."""
        if name == EVAL and self.name != EVAL:
            self._interrupted = self.name, self.detail
        self.name, self.detail = name, detail

    def end_evaluation(self) -> None:
        """Return to the phase that the evaluation interrupted; stay in any other."""
        if self.name == EVAL:
            self.name, self.detail = self._interrupted


@dataclass(slots=True)
class History:
    """Holds everything that the events of one run have reported. With several adapters, each has a
    history."""

    name: str = ""
    columns: Columns = field(default_factory=Columns)
    num_steps: int | None = None
    """Number of steps that the run will do; None: no step was done yet."""
    learns_from_rows: bool = False
    reward_histograms: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """(step, number of groups by mean reward: 0, nine tenths between, 1), see `RolloutStats`."""
    evaluations: list[Evaluation] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    warmup: Columns = field(default_factory=Columns)
    """Steps of the warm-up: loss, grad_norm, num_tokens, step_s."""
    warmup_steps: int = 0
    """Number of steps that the warm-up will do."""
    healings: list[WorkerLossRecord] = field(default_factory=list)
    notices: list[NoticeEntry] = field(default_factory=list)
    current: CurrentPhase = field(default_factory=CurrentPhase)
    phase_s: float = math.nan
    """When the run entered the phase, seconds since 1970."""
    spans: list[Span] = field(default_factory=list)
    """Finished phases of all attempts, in order."""
    began_s: float = math.nan
    """When this attempt began."""
    earlier_s: float = 0.0
    """Seconds of the attempts before it, without the pauses between them."""
    outcome: str | None = None
    """done, stopped or failed; None: no end was reported."""
    error: dict[str, object] | None = None
    took_s: float = math.nan
    """Seconds that the attempt took, when it has ended."""
    verdict: Record | None = None
    """The newest VerdictGiven."""
    check: Record | None = None
    """The newest EngineTrainerChecked, with `after`: the step that was done before it."""
    memory: dict[str, dict[str, object]] = field(default_factory=dict)
    """Worker -> its latest report of its memory, see `core.events.WorkerMemory`."""
    adapters: dict[str, History] = field(default_factory=dict)
    last_s: float = math.nan
    """When the last record was written."""

    @property
    def phase(self) -> str:
        """Return the current phase of the run."""
        return self.current.name

    @property
    def phase_detail(self) -> str:
        """Return what the current phase does."""
        return self.current.detail

    @property
    def step(self) -> int:
        """Return the number of steps done."""
        return self.columns.steps[-1] if len(self.columns) else 0

    @property
    def restarts(self) -> int:
        """Return the number of processes that were lost, over all attempts."""
        return len(self.healings)

    @property
    def share_done(self) -> float | None:
        """Return the share of the steps that is done; None if no step was counted yet."""
        return self.step / self.num_steps if self.num_steps else None

    def feed(self, record: Record) -> None:
        """Process one record. A record of an unknown kind changes nothing."""
        time_s = parse_time(record.get("time"))
        if record.get("phase") == "start" and self.last_s > self.began_s:
            self.earlier_s += self.last_s - self.began_s
        if not math.isnan(time_s):
            self.last_s = time_s
        if (adapter := record.get("adapter")) is not None:
            own = self.adapters.setdefault(adapter, History(name=adapter))
            own.feed({name: value for name, value in record.items() if name != "adapter"})
            return
        if (take := _HANDLERS.get(record["event"])) is not None:
            take(self, record, time_s)

    def _step(self, record: Record, time_s: float) -> None:
        step, self.num_steps = record["step"], record["num_steps"]
        self.learns_from_rows = record["event"] == "RowStepDone"
        if step <= self.step:
            self.evaluations = [one for one in self.evaluations if one.step < step]
            self.validations = [one for one in self.validations if one.step < step]
            self.reward_histograms = [one for one in self.reward_histograms if one[0] < step]
        _, figures = scalars_in(record) or (step, {})
        self.columns.add(step, figures, time_s=time_s)
        if counts := record.get("rollout", {}).get("reward_histogram"):
            self.reward_histograms.append((step, tuple(counts)))

    def _warmup_step(self, record: Record, time_s: float) -> None:
        report = record["report"]
        figures = {name: report[name] for name in ("loss", "grad_norm", "num_tokens")}
        self.warmup_steps = record["num_steps"]
        self.warmup.add(record["step"], {**figures, "step_s": record["step_s"]}, time_s=time_s)

    def _evaluation(self, record: Record, time_s: float) -> None:
        words = ("truncated_fraction", "response_tokens_mean")
        step = record["step"]
        self._end_evaluation(time_s)
        self.evaluations = [one for one in self.evaluations if one.step < step]
        self.evaluations.append(
            Evaluation(
                step=step,
                accuracy=record["accuracy"],
                num_prompts=record["num_prompts"],
                time_s=time_s,
                seconds=record["seconds"],
                path=record.get("path", ""),
                figures={
                    **{word: record[word] for word in words if record.get(word) is not None},
                    **record.get("figures", {}),
                },
            )
        )

    def _validation(self, record: Record, time_s: float) -> None:
        step = record["step"]
        self._end_evaluation(time_s)
        self.validations = [one for one in self.validations if one.step < step]
        self.validations.append(
            Validation(
                step=step,
                loss=record["loss"],
                seconds=record["seconds"],
                figures=dict(record.get("figures", {})),
            )
        )

    def _phase(self, record: Record, time_s: float) -> None:
        if record["phase"] == "start" or math.isnan(self.began_s):
            self.began_s, self.outcome, self.error, self.took_s = time_s, None, None, math.nan
            self.current = CurrentPhase()  # of an attempt before: nobody knows when it ended
        self._leave(time_s)
        self.current.begin(record["phase"], record.get("detail", ""))
        self.phase_s = time_s
        text = f"{self.phase}: {self.phase_detail}" if self.phase_detail else self.phase
        self._note(record, time_s, text)

    def _end_evaluation(self, time_s: float) -> None:
        if self.phase == EVAL:
            self._leave(time_s)
            self.current.end_evaluation()
            self.phase_s = time_s

    def _leave(self, time_s: float) -> None:
        if self.phase and time_s > self.phase_s:  # not of NaN either
            self.spans.append(Span(phase=self.phase, begin_s=self.phase_s, end_s=time_s))

    def _notice(self, record: Record, time_s: float) -> None:
        self._note(record, time_s, record["text"], level=record.get("level", "info"))

    def _checkpoint(self, record: Record, time_s: float) -> None:
        text = f"checkpoint of step {record['step']}, {format_bytes(record['size_bytes'])}"
        self._note(record, time_s, text, seconds=record["seconds"])

    def _mirrored(self, record: Record, time_s: float) -> None:
        text = f"copied checkpoint of step {record['step']} to {record['url']}"
        self._note(record, time_s, text, seconds=record["seconds"])

    def _check(self, record: Record, time_s: float) -> None:
        self.check = {**record, "after": self.step}
        text = f"engine and trainer differ by at most {record['diff_max']:.1e}"
        self._note(record, time_s, text)

    def _silent(self, record: Record, time_s: float) -> None:
        text = f"{record['worker']} is silent: {record['why']}"
        self._note(record, time_s, text, level="warning", seconds=record["seconds"])

    def _lost(self, record: Record, time_s: float) -> None:
        names = ("worker", "what", "step")
        self.healings.append(
            WorkerLossRecord(lost_s=time_s, **{name: record[name] for name in names})
        )
        self._note(record, time_s, f"{record['worker']} lost: {record['what']}", level="warning")

    def _replaced(self, record: Record, time_s: float) -> None:
        worker = record["worker"]
        for healing in reversed(self.healings):
            if healing.worker == worker and healing.replaced_s is None:
                healing.replaced_s, healing.source = time_s, record.get("source", "")
                healing.lost_samples = record.get("lost_samples", 0)
                break
        self._note(record, time_s, f"{worker} replaced", seconds=record["seconds"])

    def _memory(self, record: Record, time_s: float) -> None:
        for worker in record.get("workers", ()):
            self.memory[str(worker["worker"])] = dict(worker)

    def _verdict(self, record: Record, time_s: float) -> None:
        self.verdict = record
        level = "warning" if record.get("findings") else "info"
        self._note(record, time_s, f"verdict: {record['headline']}", level=level)

    def _end(self, record: Record, time_s: float) -> None:
        self._leave(time_s)
        self.phase_s = time_s
        self.outcome, self.error = record["outcome"], record.get("error")
        self.took_s = record["seconds"]
        level = "error" if self.outcome == "failed" else "info"
        self._note(record, time_s, f"run {self.outcome}", level=level, seconds=record["seconds"])

    def _note(
        self, record: Record, time_s: float, text: str, *, level: str = "info", seconds: float = 0.0
    ) -> None:
        kind, step = record["event"], record.get("step")
        self.notices.append(
            NoticeEntry(
                time_s=time_s, kind=kind, text=text, level=level, seconds=seconds, step=step
            )
        )


_HANDLERS = {
    "StepDone": History._step,
    "RowStepDone": History._step,
    "WarmupStepDone": History._warmup_step,
    "EvalDone": History._evaluation,
    "ValidationDone": History._validation,
    "PhaseStarted": History._phase,
    "Notice": History._notice,
    "CheckpointSaved": History._checkpoint,
    "CheckpointMirrored": History._mirrored,
    "EngineTrainerChecked": History._check,
    "WorkerSilent": History._silent,
    "WorkerLost": History._lost,
    "WorkerReplaced": History._replaced,
    "MemorySeen": History._memory,
    "VerdictGiven": History._verdict,
    "RunEnded": History._end,
}
