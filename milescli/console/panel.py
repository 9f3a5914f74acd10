"""One frame of the live panel: RunProgress -> something that rich draws. Pure; asked for several
times a second. RunProgress is how far a run has come: events in, figures out."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from milescli.console import theme
from milescli.console.columns import ACCURACY, GAP, Column, number, percent, rate, that_fit
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
from milescli.core.units import format_duration

KEPT_STEPS = 64
"""Steps whose full figures are kept; a screen shows fewer."""
ETA_STEPS = 10
"""The time that is left is estimated by the mean of so many last steps."""


@dataclass(slots=True, kw_only=True)
class RunProgress:
    """The state of a run that the panel draws; grows with each event."""

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
        """The newest RL step that is done."""
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
        """The accuracy of the evaluation after this step."""
        return next((done.accuracy for done in reversed(self.evals) if done.step == step), None)


FRAME_COLUMNS = 6
"""Border and padding of the panel."""
MAX_WIDTH = 150
MAX_ROWS = 12
OTHER_LINES = 14
"""Lines of the panel that are no rows of the table."""
VERDICT_FINDINGS = 2
ADAPTER_LINES = 4
"""Of each of several."""
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

PHASES = (
    ("rollout", "rollout_s", "cyan"),
    ("pack", "pack_s", "blue"),
    ("train", "train_s", "magenta"),
    ("publish", "publish_s", "green"),
    ("save", "save_s", "yellow"),
)
SMALLEST_SHARE = 0.01
"""Phases that took less of the step are not named."""


def frame(progress: RunProgress, *, width: int, height: int) -> RenderableType:
    """The whole panel for a terminal of this size."""
    width = min(width, MAX_WIDTH)
    inner = max(20, width - FRAME_COLUMNS)
    parts: list[RenderableType] = [_bar_line(progress, inner)]
    if progress.steps:
        rollout = progress.steps[-1].rollout
        by_part = _means(rollout.reward_parts, inner) + _means(rollout.figures, inner)
        height -= len(by_part)
        if progress.verdict is not None:
            height -= 2 + min(VERDICT_FINDINGS, len(progress.verdict.findings))
        parts += [Text(), _trend(progress, inner), *by_part]
        parts += [Text(), _table(progress, inner, height)]
        parts += [Text(), _phases(progress.steps[-1], inner), _health(progress.steps[-1], inner)]
    elif progress.row_step is not None:
        parts += [Text(), _losses(progress, inner), Text(), _row_health(progress.row_step, inner)]
    elif progress.is_warming_up:
        parts += [Text(), _warmup(progress, inner)]
    if progress.verdict is not None:
        parts += [Text(), *_verdict(progress.verdict, inner)]
    for one in [*progress.adapters.values()][: max(1, (height - OTHER_LINES) // ADAPTER_LINES + 1)]:
        parts += [Text(), *_adapter(one, inner)]
    style, word = _state(progress)
    return Panel(
        Group(*parts),
        title=Text.assemble((progress.name, theme.TITLE)),
        title_align="left",
        subtitle=Text(word, style=style),
        subtitle_align="right",
        border_style=theme.BORDER
        if progress.ended is None or progress.ended.outcome != "failed"
        else theme.BAD,
        padding=(1, 2),
        width=width,
    )


def _verdict(given: VerdictGiven, width: int) -> list[Text]:
    """Whether it is learning; and what is wrong, each on a line."""
    style = theme.WARN if given.findings or given.is_learning is False else theme.GOOD
    lines = [Text.assemble(("verdict ", theme.LABEL), (given.headline, style))]
    shown = [*given.findings.values()][:VERDICT_FINDINGS]
    lines += [Text(f"        ! {text}", style=theme.QUIET) for text in shown]
    return [_cut(line, width) for line in lines]


def _adapter(progress: RunProgress, width: int) -> list[RenderableType]:
    """One of several: how far it is, its reward, and how its last step was."""
    parts: list[RenderableType] = [Text(progress.name, style=theme.TITLE)]
    parts.append(_bar_line(progress, width))
    if progress.steps:
        parts += [_trend(progress, width)]
    elif progress.is_warming_up:
        parts.append(_warmup(progress, width))
    return parts


def _state(progress: RunProgress) -> tuple[str, str]:
    if progress.ended is None:
        return theme.ACCENT, progress.phase
    outcome = progress.ended.outcome
    return {"done": theme.GOOD, "stopped": theme.WARN}.get(outcome, theme.BAD), outcome


def _bar_line(progress: RunProgress, width: int) -> Text:
    if progress.last is not None:
        counted = f"step {progress.last.step}/{progress.last.num_steps}"
    elif progress.row_step is not None:
        counted = f"step {progress.row_step.step}/{progress.row_step.num_steps}"
    elif progress.warmup is not None:
        counted = f"warmup {progress.warmup.step}/{progress.warmup.num_steps}"
    else:
        counted = progress.phase
    times = format_duration(progress.elapsed_s)
    if progress.left_s is not None:
        times += f" · {format_duration(progress.left_s)} left"
    if progress.share_done is None:
        turn = (
            SPINNER[int(progress.elapsed_s * 8) % len(SPINNER)] if progress.ended is None else " "
        )
        room = max(0, width - len(times) - len(counted) - 6)
        detail = progress.detail[:room].ljust(room)
        return Text.assemble(
            (f"{turn} ", theme.ACCENT),
            (counted, theme.TITLE),
            f"  {detail}  ",
            (times, theme.QUIET),
        )
    length = max(4, width - len(counted) - len(times) - 4)
    full = round(length * min(1.0, progress.share_done))
    color = theme.GOOD if progress.share_done >= 1 else theme.ACCENT
    bar = Text.assemble(("━" * full, color), ("─" * (length - full), theme.BORDER))
    return Text.assemble((counted, theme.TITLE), "  ", bar, "  ", (times, theme.QUIET))


def _trend(progress: RunProgress, width: int) -> Text:
    first, last = progress.rewards[0], progress.rewards[-1]
    words = f"reward  {number(first, '.3f')} → {number(last, '.3f')}  "
    accuracy = _accuracy(progress)
    bounded = all(0 <= reward <= 1 for reward in progress.rewards if math.isfinite(reward))
    room = max(8, width - len(words) - (len(accuracy) + 3 if accuracy else 0))
    limits = {"low": 0.0, "high": 1.0} if bounded else {}
    line = theme.sparkline(progress.rewards, min(room, 60), **limits)
    gap = max(3, width - len(words) - len(line) - len(accuracy))
    return Text.assemble(
        ("reward  ", theme.LABEL),
        f"{number(first, '.3f')} → ",
        (f"{number(last, '.3f')}  ", "bold"),
        (line, theme.REWARD),
        (" " * gap if accuracy else ""),
        (accuracy, ""),
    )


def _means(means: Mapping[str, float], width: int) -> list[Text]:
    """One line with the mean of each part of the reward, or of what agents tell, where there are
    any."""
    words = "  ".join(f"{name} {number(mean, '.3f')}" for name, mean in means.items())
    return [Text(f"        {words}"[:width], style=theme.QUIET)] if words else []


def _accuracy(progress: RunProgress) -> str:
    if not progress.evals:
        return ""
    first, last = progress.evals[0], progress.evals[-1]
    if len(progress.evals) == 1:
        return f"accuracy  {percent(last.accuracy)}"
    return f"accuracy  {percent(first.accuracy)} → {percent(last.accuracy)}"


def _table(progress: RunProgress, width: int, height: int) -> Table:
    columns = that_fit(width)
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 0),
        show_edge=False,
        header_style=theme.HEADER,
        collapse_padding=True,
    )
    for place, column in enumerate(columns):
        room = column.width + (GAP if place else 0)
        table.add_column("\n".join(column.head), justify="right", width=room, no_wrap=True)
    rows = max(1, min(MAX_ROWS, height - OTHER_LINES))
    shown = list(progress.steps)[-rows:]
    for done in shown:
        table.add_row(
            *(_cell(column, done, progress) for column in columns),
            style="" if done is shown[-1] else theme.QUIET,
        )
    return table


def _cell(column: Column, done: StepDone, progress: RunProgress) -> Text:
    if column is ACCURACY:
        accuracy = progress.accuracy_at(done.step)
        return Text(percent(accuracy), style="not dim green") if accuracy is not None else Text()
    text = column.write(done)
    if text in ("nan", "inf", "-inf"):
        return Text(text, style=f"not dim {theme.BAD}")
    bound = progress.check.bound_max if progress.check else math.inf
    if column.word == "logprob_diff_max" and done.report.logprob_diff_max > bound:
        return Text(text, style=f"not dim {theme.WARN}")
    return Text(text)


def _phases(done: StepDone, width: int) -> Text:
    """Where the last step's time went: `rollout 2.10 s  train 0.84 s ...`, and a bar in
    proportion."""
    parts = [(word, getattr(done.seconds, field), style) for word, field, style in PHASES]
    total = sum(spent for _, spent, _ in parts if math.isfinite(spent))
    shown = [
        (word, spent, style)
        for word, spent, style in parts
        if math.isfinite(spent) and spent > SMALLEST_SHARE * total
    ]
    words = Text("   ").join(
        Text.assemble(("■ ", style), (f"{word} ", theme.LABEL), f"{spent:.2f} s")
        for word, spent, style in shown
    )
    room = width - words.cell_len - 3
    if room < 12 or total <= 0:
        return _cut(words, width)
    length, edge, bar = min(room, 40), 0.0, Text()
    for _, spent, style in shown:
        start, edge = edge, edge + length * spent / total
        bar.append("▀" * (int(edge) - int(start)), style)
    return Text.assemble(words, "   ", bar)


def _health(done: StepDone, width: int) -> Text:
    rollout = done.rollout
    speed = f"rollout {rate(done.rollout_tokens_per_s)}, train {rate(done.train_tokens_per_s)}"
    has_speed_columns = any(column.word == "train_tokens/s" for column in that_fit(width))
    facts = [
        *([] if has_speed_columns else [("tokens/s", speed)]),
        ("staleness", f"{number(rollout.staleness_mean, '.1f')} (max {rollout.staleness_max})"),
        ("zero variance", f"{percent(rollout.zero_variance_fraction)} of groups"),
        ("truncated", percent(rollout.truncated_fraction)),
        ("clipped", percent(done.report.figures.get("clip_fraction"))),
        ("grad norm", number(done.report.grad_norm, ".2f")),
        ("lr", number(done.report.lr, ".1e")),
    ]
    line = Text("   ").join(Text.assemble((f"{word} ", theme.LABEL), text) for word, text in facts)
    while line.cell_len > width and len(facts) > 1:
        facts.pop()
        line = Text("   ").join(
            Text.assemble((f"{word} ", theme.LABEL), text) for word, text in facts
        )
    return _cut(line, width)


def _losses(progress: RunProgress, width: int) -> Text:
    first, last = progress.losses[0], progress.losses[-1]
    words = f"{number(first, '.3f')} → {number(last, '.3f')}  "
    held = ""
    if progress.validations:
        start, now = progress.validations[0], progress.validations[-1]
        held = f"   held out  {number(start.loss, '.3f')} → {number(now.loss, '.3f')}"
    if accuracy := _accuracy(progress):
        held += f"   {accuracy}"
    room = max(8, min(60, width - len(words) - 6 - len(held)))
    line = theme.sparkline(progress.losses, room)
    return Text.assemble(("loss  ", theme.LABEL), words, (line, theme.ACCENT), held)


def _row_health(done: RowStepDone, width: int) -> Text:
    report = done.report
    facts = [
        *((name.replace("_", " "), number(value, ".3f")) for name, value in report.figures.items()),
        ("epoch", f"{done.epoch:.2f}"),
        ("tokens/s", rate(done.tokens_per_s)),
        ("grad norm", number(report.grad_norm, ".2f")),
        ("lr", number(report.lr, ".1e")),
    ]
    line = Text("   ").join(Text.assemble((f"{word} ", theme.LABEL), text) for word, text in facts)
    return _cut(line, width)


def _warmup(progress: RunProgress, width: int) -> Text:
    assert progress.warmup is not None
    report = progress.warmup.report
    words = f"loss  {number(progress.warmup_losses[0], '.3f')} → {number(report.loss, '.3f')}  "
    speed = (
        f"   {rate(report.num_tokens / progress.warmup.step_s)} tokens/s"
        if progress.warmup.step_s > 0
        else ""
    )
    line = theme.sparkline(progress.warmup_losses, max(8, min(60, width - len(words) - len(speed))))
    return Text.assemble(
        (words[:6], theme.LABEL), words[6:], (line, theme.ACCENT), (speed, theme.QUIET)
    )


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text
