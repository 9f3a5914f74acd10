"""Shows a run as the mode and the terminal allow (LiveRun): the live panel, or events as lines of
text, as in a log file. A listener of the event bus, created by the runtime."""

from __future__ import annotations

import io
import math
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from milescli.console import theme
from milescli.console.columns import figures, number, rate
from milescli.console.output import Mode, Output
from milescli.console.panel import frame
from milescli.core.events import (
    AdapterEvent,
    CheckpointMirrored,
    CheckpointSaved,
    EngineTrainerChecked,
    EvalDone,
    Event,
    Notice,
    PhaseStarted,
    RowStepDone,
    RunEnded,
    StepDone,
    ValidationDone,
    VerdictGiven,
    WarmupStepDone,
    WorkerLost,
    WorkerReplaced,
    WorkerSilent,
    stamped,
    to_record,
)
from milescli.core.history import History
from milescli.core.scalars import figures_below, objective_figures, scalars_of
from milescli.core.units import format_bytes, format_duration

WARMUP_LINES = 10
"""Largest number of lines of the warm-up in a log, whatever its length."""
LABEL_WIDTH = 10
"""Characters before the text of a milestone."""
_TIMED = ("rollout", "train", "publish", "step")


def step_line(event: Event) -> Text | None:
    """Return a step as one line, aligned with its neighbours; None for other events and for most
    warm-up steps."""
    if isinstance(event, AdapterEvent):
        return _named(event.adapter, step_line(event.event))
    if isinstance(event, StepDone | RowStepDone):
        scalars = scalars_of(event)
        assert scalars is not None, event
        parts = (_step if isinstance(event, StepDone) else _row_step)(scalars[1])
        counted = f"step {event.step:>{len(str(event.num_steps))}}/{event.num_steps}"
        return Text("  ".join([counted, *parts]))
    if isinstance(event, WarmupStepDone):
        every = max(1, event.num_steps // WARMUP_LINES)
        if event.step % every and event.step != event.num_steps:
            return None
        digits = len(str(event.num_steps))
        loss = number(event.report.loss, ".4f")
        return Text(
            f"warmup {event.step:>{digits}}/{event.num_steps}  loss {loss}  lr "
            f"{event.report.lr:.1e}  step_s {event.step_s:.2f}"
        )
    return None


def _row_step(figures: Mapping[str, float]) -> list[str]:
    return [
        f"epoch {figures['train/epoch']:.2f}",
        f"loss {number(figures['train/loss'], '7.4f')}",
        *_named_figures(objective_figures(figures), ".3f"),
        f"grad_norm {number(figures['train/grad_norm'], '.2f')}",
        f"lr {figures['train/lr']:.1e}",
        f"tokens/s {rate(figures['speed/train_tokens_per_s']):>5}",
        f"step_s {figures['time/step_s']:.2f}",
    ]


def _step(figures: Mapping[str, float]) -> list[str]:
    rollout_speed, train_speed = (
        f"{rate(figures[f'speed/{who}_tokens_per_s']):>5}" for who in ("rollout", "train")
    )
    seconds = (f"{who} {number(figures[f'time/{who}_s'], '.2f')}" for who in _TIMED)
    accepted = figures.get("rollout/accept_length")
    return [
        f"reward {number(figures['rollout/reward_mean'], '.3f')}",
        *_named_figures(figures_below(figures, "reward"), ".3f"),
        *_named_figures(figures_below(figures, "agent"), ".2f"),
        f"loss {number(figures['train/loss'], '7.4f')}",
        f"kl {number(figures.get('train/kl'), '.4f')}",
        f"entropy {number(figures.get('train/entropy'), '.3f')}",
        f"logprob_diff_max {number(figures['train/logprob_diff_max'], '.1e')}",
        f"response_tokens {number(figures['rollout/response_tokens_mean'], '5.1f')}",
        f"staleness {number(figures['rollout/staleness_mean'], '.1f')}",
        *([] if accepted is None else [f"accept_length {number(accepted, '.2f')}"]),
        f"tokens/s rollout {rollout_speed} train {train_speed}",
        f"s {' '.join(seconds)}",
    ]


def _named_figures(figures: Mapping[str, float], form: str) -> list[str]:
    return [f"{name} {number(value, form)}" for name, value in figures.items()]


def milestone(event: Event) -> Text | None:
    """Return the line of an event that stays on the screen: evaluations, checkpoints, warnings, the
    end. None for all others."""
    if isinstance(event, AdapterEvent):
        return _named(event.adapter, milestone(event.event))
    when = f"step {event.step}" if getattr(event, "step", 0) else "before step 1"
    if isinstance(event, ValidationDone):
        shown = "".join(f", {name} {value:.3f}" for name, value in event.figures.items())
        text = f"{when}: loss {event.loss:.4f}{shown} on {event.num_rows} held-out rows"
        return _line("validated", f"{text}, {format_duration(event.seconds)}", theme.GOOD)
    if isinstance(event, EvalDone):
        return _line(
            "eval",
            f"{when}: accuracy {figures(event)}, {format_duration(event.seconds)}",
            theme.GOOD,
        )
    if isinstance(event, CheckpointSaved):
        size = format_bytes(event.size_bytes)
        return _line(
            "saved",
            f"step {event.step}: {event.path} ({size}, {format_duration(event.seconds)})",
            theme.ACCENT,
        )
    if isinstance(event, CheckpointMirrored):
        where = f"{event.url} ({format_bytes(event.size_bytes)}, {format_duration(event.seconds)})"
        return _line("copied", f"step {event.step}: {where}", theme.ACCENT)
    if isinstance(event, EngineTrainerChecked):
        is_equal = event.agreement == "equal"
        text = (
            f"engine and trainer {'agree' if is_equal else 'differ'}: |difference of logprobs| "
            f"max {event.diff_max:.1e}, mean {event.diff_mean:.1e} "
        )
        floor = f"rounding alone: {event.floor_max:.1e}, {event.floor_mean:.1e}"
        return _line(
            "check",
            text + f"over {event.num_tokens} tokens ({floor})",
            theme.GOOD if is_equal else theme.WARN,
        )
    if isinstance(event, Notice):
        label, style = (
            ("warning", theme.WARN) if event.level == "warning" else ("note", theme.QUIET)
        )
        return _line(label, event.text, style)
    if isinstance(event, WorkerSilent):
        since, limit = format_duration(event.seconds), format_duration(event.limit_s)
        text = (
            f"{event.worker} has been silent for {since}: {event.why}; it was ended after {limit}"
        )
        return _line("silent", text, theme.WARN)
    if isinstance(event, WorkerLost):
        return _line("lost", f"{event.what}; miles starts another one", theme.WARN)
    if isinstance(event, WorkerReplaced):
        return _line("replaced", event.sentence, theme.GOOD)
    if isinstance(event, VerdictGiven):
        style = theme.WARN if event.findings or event.is_learning is False else theme.GOOD
        return _line("verdict", f"{when}: {event.headline}", style)
    if isinstance(event, RunEnded):
        style = {"done": theme.GOOD, "stopped": theme.WARN}.get(event.outcome, theme.BAD)
        return _line(
            event.outcome, f"at step {event.step}, after {format_duration(event.seconds)}", style
        )
    return None


def phase_line(event: Event) -> Text | None:
    """Return the line of a new phase, for logs; the panel shows it in its frame."""
    if isinstance(event, AdapterEvent):
        return _named(event.adapter, phase_line(event.event))
    return (
        _line(event.phase, event.detail, theme.ACCENT) if isinstance(event, PhaseStarted) else None
    )


def _named(adapter: str, line: Text | None) -> Text | None:
    return None if line is None else Text.assemble((f"{adapter}: ", theme.ACCENT), line)


def _line(label: str, text: str, style: str) -> Text:
    return Text.assemble((label.ljust(LABEL_WIDTH), style), text)


_REMOTE_FONT = re.compile(r',\s*url\("https?://[^"]*"\) format\("[^"]*"\)')
"""rich's pictures download their font from the web; ours use an installed one."""
REFRESH_PER_S = 4
SVG_MILESTONES = 9
"""Number of lines above the panel in a picture."""


class LiveRun:
    """Shows a run: on a terminal a panel that redraws itself; in a log one line a step; with --json
    one event a line; quiet: warnings.

    with LiveRun(output, name="quickstart-1") as view:
        bus.listeners.append(view)
    """

    def __init__(self, output: Output, *, name: str, history: History | None = None) -> None:
        """Set up the view. `name`: of the run, for the title of the frame; `history`: of its
        earlier attempts."""
        self.output = output
        self.history = history or History(name=name)
        self._began_s = time.monotonic()
        self._milestones: deque[Text] = deque(maxlen=SVG_MILESTONES)
        self._lock = threading.RLock()  # the panel is drawn by a thread of its own
        self._live: Live | None = None
        self._is_closed = False

    def __enter__(self) -> LiveRun:
        if self.output.mode is Mode.HUMAN and self.output.is_interactive:
            self._live = Live(
                console=self.output.narration,
                get_renderable=self._current_frame,
                refresh_per_second=REFRESH_PER_S,
                # data that goes to a file must not end on the screen
                redirect_stdout=self.output.data.is_terminal,
                vertical_overflow="crop",
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Draw the last frame and restore the terminal, including the cursor. Idempotent."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def __call__(self, event: Event) -> None:
        """Show one event. Never raises if the reader is gone: a run outlives its terminal."""
        with self._lock:
            self.history.feed(stamped(event))
            if (line := milestone(event)) is not None:
                self._milestones.append(line)
        if self._is_closed:
            return
        try:
            self._show(event)
        except (OSError, ValueError):
            # the terminal or the pipe was closed; files and trackers still record the run
            self._is_closed = True

    def save_svg(
        self, path: Path, *, command: str = "", width: int = 110, height: int = 40
    ) -> None:
        """Save the last frame, and the milestones above it, as a picture. `command` is shown as the
        line that was typed."""
        with self._lock:
            picture = Console(
                record=True,
                file=io.StringIO(),
                width=width,
                height=height,
                force_terminal=True,
                color_system="truecolor",
            )
            if command:
                picture.print(Text.assemble(("$ ", theme.QUIET), command))
            for line in self._milestones:
                picture.print(line, overflow="ellipsis", no_wrap=True)
            picture.print(self._frame(width, height))
            svg = picture.export_svg(title=command or self.history.name)
        path.write_text(_REMOTE_FONT.sub("", svg), encoding="utf-8")

    def _show(self, event: Event) -> None:
        if self.output.mode is Mode.JSON:
            self.output.json("event", to_record(event))
        elif self.output.mode is Mode.QUIET:
            own = event.event if isinstance(event, AdapterEvent) else event
            if isinstance(own, Notice) and own.level == "warning":
                self.output.warn(own.text)
        elif self._live is not None:
            if (line := milestone(event)) is not None:
                self.output.narration.print(line)
            if isinstance(event, PhaseStarted):
                self._live.refresh()
        else:
            line = step_line(event) or milestone(event) or phase_line(event)
            if line is not None:
                self.output.narration.print(line, soft_wrap=True)

    def _current_frame(self) -> RenderableType:
        with self._lock:
            size = self.output.narration.size
            return self._frame(size.width, size.height)

    def _frame(self, width: int, height: int) -> RenderableType:
        took_s = self.history.took_s
        elapsed_s = time.monotonic() - self._began_s if math.isnan(took_s) else took_s
        return frame(self.history, elapsed_s=elapsed_s, width=width, height=height)
