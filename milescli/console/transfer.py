"""Bytes as they are moved: a bar on a terminal, now and then a line in a log, one event a line with
--json. Made by the runtime."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from milescli.console.output import Mode, Output
from milescli.core.units import format_bytes, format_duration

LINE_EVERY_S = 10.0
"""A log gets a line so often."""
EVENT_EVERY_S = 1.0
"""A program that reads JSON gets an event so often."""


class Transfer:
    """Call it with bytes as they are done; from any thread. A context manager."""

    def __init__(
        self, output: Output, *, label: str, total_bytes: int, done_bytes: int = 0
    ) -> None:
        """`done_bytes`: of an earlier attempt; they do not count for the speed."""
        self.output, self.label, self.total_bytes, self.done_bytes = (
            output,
            label,
            total_bytes,
            done_bytes,
        )
        self._before, self._began = done_bytes, time.monotonic()
        self._last_shown = self._began
        self._lock = threading.Lock()
        self._bar: Progress | None = None

    def __enter__(self) -> Transfer:
        self._began = self._last_shown = time.monotonic()
        if self.output.mode is Mode.HUMAN and self.output.is_interactive:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=self.output.narration,
                transient=True,
            )
            self._task = self._bar.add_task(
                self.label, total=self.total_bytes, completed=self.done_bytes
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and self.output.mode is Mode.JSON:
            self._event()

    def __call__(self, num_bytes: int) -> None:
        """So many more are done."""
        with self._lock:
            self.done_bytes += num_bytes
            if self._bar is not None:
                self._bar.advance(self._task, num_bytes)
                return
            now = time.monotonic()
            if self.output.mode is Mode.JSON and now - self._last_shown >= EVENT_EVERY_S:
                self._last_shown = now
                self._event()
            elif self.output.mode is Mode.HUMAN and now - self._last_shown >= LINE_EVERY_S:
                self._last_shown = now
                left = "" if self.eta_s is None else f", {format_duration(self.eta_s)} left"
                self.output.note(
                    f"{self.label}: {format_bytes(self.done_bytes)} of "
                    f"{format_bytes(self.total_bytes)}, "
                    f"{format_bytes(self.bytes_per_s)}/s{left}"
                )

    @property
    def seconds(self) -> float:
        """Since the start of this attempt."""
        return time.monotonic() - self._began

    @property
    def bytes_per_s(self) -> float:
        """Of this attempt."""
        return (self.done_bytes - self._before) / max(self.seconds, 1e-6)

    @property
    def eta_s(self) -> float | None:
        """Until the end at this speed."""
        speed = self.bytes_per_s
        return (self.total_bytes - self.done_bytes) / speed if speed else None

    def _event(self) -> None:
        self.output.json(
            "progress",
            {
                "label": self.label,
                "done_bytes": self.done_bytes,
                "total_bytes": self.total_bytes,
                "bytes_per_s": self.bytes_per_s,
                "eta_s": self.eta_s,
            },
        )
