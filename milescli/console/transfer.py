"""Shows the progress of long work: a bar on a terminal, a line now and then in a log, one event per
line with --json, nothing with --quiet; with rate and remaining time, in bytes or any other unit.
Used by the runtime, but not while a run draws its panel, which would overwrite it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from milescli.console import theme
from milescli.console.output import Mode, Output
from milescli.core.units import format_bytes, format_count, format_duration

LINE_EVERY_S = 10.0
"""Seconds between two lines in a log."""
EVENT_EVERY_S = 1.0
"""Seconds between two JSON events; there is one more at the end."""
BYTES = "bytes"
_LEAST_BAR, _MOST_BAR, _DONE = 6, 24, "━"


class Transfer:
    """Shows progress; call it with the number of new units, from any thread. A context manager."""

    def __init__(
        self,
        output: Output,
        *,
        label: str,
        total: int,
        done: int = 0,
        unit: str = BYTES,
        tells_quick: bool = True,
    ) -> None:
        """Show a transfer. `unit` is BYTES, or a plural such as samples. `done` comes from an
        earlier attempt and does not count for the speed. `tells_quick` also reports work that is
        done within EVENT_EVERY_S."""
        self.output, self.label, self.unit = output, label, unit
        self.total, self.done = total, done
        self._before, self._began = done, time.monotonic()
        self._last_shown = self._began
        self._tells_quick = tells_quick
        self._lock = threading.Lock()
        self._bar: Progress | None = None

    def __enter__(self) -> Transfer:
        self._began = self._last_shown = time.monotonic()
        if self.output.mode is Mode.HUMAN and self.output.is_interactive:
            self._bar = Progress(
                _Line(self.progress_text, width=self.output.narration.width),
                console=self.output.narration,
                transient=True,
            )
            self._task = self._bar.add_task(self.label, total=self.total, completed=self.done)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            return
        is_told = self._tells_quick or self.seconds >= EVENT_EVERY_S
        if kind is None and self.output.mode is Mode.JSON and is_told:
            self._event()

    def __call__(self, num: int) -> None:
        """Add `num` completed units."""
        with self._lock:
            self.done += num
            if self._bar is not None:
                self._bar.advance(self._task, num)
                return
            now = time.monotonic()
            if self.output.mode is Mode.JSON and now - self._last_shown >= EVENT_EVERY_S:
                self._last_shown = now
                self._event()
            elif self.output.mode is Mode.HUMAN and now - self._last_shown >= LINE_EVERY_S:
                self._last_shown = now
                self.output.note(f"{self.label}: {self.progress_text()}")

    def reached(self, num: int) -> None:
        """Set the number of completed units; a smaller number than before changes nothing."""
        if num > self.done:
            self(num - self.done)

    def progress_text(self) -> str:
        """Format the progress: 50.0 MiB of 100.0 MiB, 1.0 MiB/s, 50.0 s left."""
        left = "" if self.eta_s is None else f", {format_duration(self.eta_s)} left"
        if self.unit == BYTES:
            return (
                f"{format_bytes(self.done)} of {format_bytes(self.total)}, "
                f"{format_bytes(self.per_s)}/s{left}"
            )
        speed = f"{self.per_s:.1f}" if self.per_s < 1000 else format_count(self.per_s)
        return f"{self.done:,} of {self.total:,} {self.unit}, {speed}/s{left}"

    @property
    def seconds(self) -> float:
        """Return the seconds since this attempt started."""
        return time.monotonic() - self._began

    @property
    def per_s(self) -> float:
        """Return the rate of this attempt, in its unit per second."""
        return (self.done - self._before) / max(self.seconds, 1e-6)

    @property
    def eta_s(self) -> float | None:
        """Return the seconds until the end at the current rate; None before there is a rate."""
        return max(0, self.total - self.done) / self.per_s if self.per_s else None

    def _event(self) -> None:
        fields: dict[str, object] = {
            "label": self.label,
            "unit": self.unit,
            "done": self.done,
            "total": self.total,
            "per_s": self.per_s,
            "eta_s": self.eta_s,
        }
        if self.unit == BYTES:
            fields |= {
                "done_bytes": self.done,
                "total_bytes": self.total,
                "bytes_per_s": self.per_s,
            }
        self.output.json("progress", fields)


class _Line(ProgressColumn):
    """Shows the label, a bar, the amount, the rate and the remaining time, up to date even while
    nothing arrives. On a narrow terminal the bar is dropped first, then the end of the label; the
    figures stay."""

    def __init__(self, progress_text: Callable[[], str], *, width: int) -> None:
        super().__init__()
        self._say, self._width = progress_text, width

    def render(self, task: Task) -> Text:
        """Draw the line; rich calls it."""
        return bar_line(
            task.description, self._say(), share=(task.percentage or 0) / 100, width=self._width
        )


def bar_line(label: str, progress_text: str, *, share: float, width: int) -> Text:
    """Draw a line of at most `width` characters; the figures are always shown whole."""
    room = width - len(progress_text) - 2
    if len(label) > room - _LEAST_BAR - 1:
        return Text.assemble(label[: max(0, room)], " ", (progress_text, theme.QUIET), no_wrap=True)
    bar = min(_MOST_BAR, room - len(label) - 1)
    done = round(min(1.0, max(0.0, share)) * bar)
    return Text.assemble(
        f"{label} ",
        (_DONE * done, theme.ACCENT),
        (_DONE * (bar - done), theme.BORDER),
        " ",
        (progress_text, theme.QUIET),
        no_wrap=True,
    )
