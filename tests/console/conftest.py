"""Streams that can be read back; one of them claims to be a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from milescli.console.output import Mode, Output


class Terminal(io.StringIO):
    """A terminal of 100 columns that keeps what it was sent."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size and the colours of the machine that runs the tests do not count."""
    for name in (
        "NO_COLOR",
        "FORCE_COLOR",
        "GITHUB_ACTIONS",
        "COLORTERM",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")


@pytest.fixture
def speak() -> Callable[..., Output]:
    """Output in a mode, to strings; `terminal=True` lets stderr be a terminal."""

    def make(mode: Mode = Mode.HUMAN, *, terminal: bool = False) -> Output:
        return Output(mode, stdout=io.StringIO(), stderr=Terminal() if terminal else io.StringIO())

    return make


def said(output: Output) -> tuple[str, str]:
    """(stdout, stderr) so far."""
    return output.data.file.getvalue(), output.narration.file.getvalue()  # type: ignore[attr-defined]
