"""Shows work of unknown length: on a terminal a spinner with the time and a message; in a log a
line now and then. Nothing with --json or --quiet. Work of known length has a bar instead
(`transfer`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.text import Text

from milescli.console import theme
from milescli.console.output import Mode, Output
from milescli.console.panel import SPINNER
from milescli.core.units import format_duration

LINE_EVERY_S = 10.0
"""Seconds between two lines in a log."""
TURNS_PER_S = 8


@contextmanager
def working(output: Output, message: Callable[[], str]) -> Iterator[None]:
    """Show `message()` while the block runs. It is called from a thread of its own."""
    began = time.monotonic()
    if output.mode is not Mode.HUMAN:
        yield
        return
    if output.is_interactive:

        def line() -> Text:
            spent = time.monotonic() - began
            text = Text.assemble(
                (f"{SPINNER[int(spent * TURNS_PER_S) % len(SPINNER)]} ", theme.ACCENT),
                (f"{format_duration(spent)}  ", theme.QUIET),
                message(),
                no_wrap=True,
            )
            text.truncate(output.narration.width, overflow="ellipsis")
            return text

        live = Live(
            console=output.narration,
            get_renderable=line,
            refresh_per_second=TURNS_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with live:
            yield
        return
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(LINE_EVERY_S):
            output.note(f"{format_duration(time.monotonic() - began)}: {message()}")

    threading.Thread(target=tell, name="working", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
