"""LiveRun: watches a run and shows it, as the mode and the terminal allow. A listener of the event
bus, made by the runtime."""

from __future__ import annotations

import io
import re
import threading
from collections import deque
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from milescli.console import lines, theme
from milescli.console.output import Mode, Output, envelope
from milescli.console.panel import frame
from milescli.console.progress import RunProgress
from milescli.core.events import Event, Notice, OfAdapter, PhaseStarted, to_record

_REMOTE_FONT = re.compile(r',\s*url\("https?://[^"]*"\) format\("[^"]*"\)')
"""rich's pictures fetch their font from the web; ours take one that is there."""
REFRESH_PER_S = 4
SVG_MILESTONES = 9
"""How many of the lines above the panel a picture shows."""


class LiveRun:
    """On a terminal a panel that redraws itself; in a log one line a step; with --json one event a
    line; quiet: warnings.

    with LiveRun(output, name="quickstart-1") as view:
        bus.listeners.append(view)
    """

    def __init__(self, output: Output, *, name: str) -> None:
        """`name` of the run stands in the frame."""
        self.output = output
        self.progress = RunProgress(name=name)
        self._milestones: deque[Text] = deque(maxlen=SVG_MILESTONES)
        self._lock = threading.RLock()  # the panel is drawn by a thread of its own
        self._live: Live | None = None
        self._is_closed = False

    def __enter__(self) -> LiveRun:
        if self.output.mode is Mode.HUMAN and self.output.is_interactive:
            self._live = Live(
                console=self.output.narration,
                get_renderable=self._frame,
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
        """Draw the last frame and give the terminal back, cursor included. Idempotent."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def __call__(self, event: Event) -> None:
        """Show one event. Never raises because the reader is gone: a run outlives its terminal."""
        with self._lock:
            self.progress.feed(event)
            if (line := lines.milestone(event)) is not None:
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
        """The last frame, and the milestones above it, as a picture. `command` is shown as the line
        that was typed."""
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
            picture.print(frame(self.progress, width=width, height=height))
            svg = picture.export_svg(title=command or self.progress.name)
        path.write_text(_REMOTE_FONT.sub("", svg), encoding="utf-8")

    def _show(self, event: Event) -> None:
        if self.output.mode is Mode.JSON:
            self.output.data.file.write(envelope("event", to_record(event)) + "\n")
            self.output.data.file.flush()
        elif self.output.mode is Mode.QUIET:
            told = event.event if isinstance(event, OfAdapter) else event
            if isinstance(told, Notice) and told.level == "warning":
                self.output.warn(told.text)
        elif self._live is not None:
            if (line := lines.milestone(event)) is not None:
                self.output.narration.print(line)
            if isinstance(event, PhaseStarted):
                self._live.refresh()
        else:
            line = lines.step_line(event) or lines.milestone(event) or lines.phase_line(event)
            if line is not None:
                self.output.narration.print(line, soft_wrap=True)

    def _frame(self) -> RenderableType:
        with self._lock:
            size = self.output.narration.size
            return frame(self.progress, width=size.width, height=size.height)
