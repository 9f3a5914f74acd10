"""Shows long pages on a terminal through a pager: $PAGER, else `less`. Not used if the page fits on
the screen, with --json or --quiet, into a pipe or a file, or with NO_PAGER or PAGER=cat. Messages
on stderr do not wait for it."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from rich.text import Text

from milescli.console.output import Mode, Output

LESS = "FRX"
"""Options of `less` if LESS is not set: colours, and the text stays on the screen."""


@contextmanager
def paging(output: Output) -> Iterator[None]:
    """Collect what the block prints on stdout, and show it by the pager if it is longer than the
    screen."""
    command = _pager(output)
    if command is None:
        yield
        return
    terminal, page = output.data.file, _Page()
    output.data.file = page
    try:
        with redirect_stdout(page):
            yield
    except BaseException:
        command = None
        raise
    finally:
        output.data.file = terminal
        text = page.getvalue()
        data = text.encode(terminal.encoding or "utf-8", terminal.errors or "replace")
        if command is None or _fits(text, output) or not _show(data, command):
            terminal.write(text)
            terminal.flush()


class _Page(io.StringIO):
    """Holds a text that is drawn for a terminal."""

    def isatty(self) -> bool:
        return True


def _pager(output: Output) -> list[str] | None:
    """Return the command of the pager; None if no pager is used."""
    if output.mode is not Mode.HUMAN or not output.data.is_terminal or not sys.stdin.isatty():
        return None
    if output.data.is_dumb_terminal or os.environ.get("NO_PAGER"):
        return None
    try:
        command = shlex.split(os.environ.get("PAGER", "less"))
    except ValueError:
        return None
    if not command or command[0] == "cat" or shutil.which(command[0]) is None:
        return None
    return command


def _fits(text: str, output: Output) -> bool:
    """Return True if the page and the next prompt fit on the screen together."""
    width, height = output.data.size
    lines = (Text.from_ansi(line).cell_len for line in text.splitlines())
    return sum(max(1, -(-cells // width)) for cells in lines) < height


def _show(text: bytes, command: list[str]) -> bool:
    """Return False if the pager cannot be started. Ctrl-C is the pager's."""
    environ = {"LESS": LESS, "LV": "-c", **os.environ}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environ) as pager:
            pager.communicate(text)
    except OSError:
        return False
    finally:
        signal.signal(signal.SIGINT, before)
    return True
