"""A screen of figures: on a terminal drawn in place, elsewhere not at all."""

from __future__ import annotations

import io
import re

import pytest

from milescli.console.output import Mode, Output, redrawn, show_lines
from tests.console.conftest import Terminal


def on_terminals(mode: Mode = Mode.HUMAN) -> tuple[Output, io.StringIO]:
    """Output whose streams both are, and what goes to stdout."""
    stdout = Terminal()
    return Output(mode, stdout=stdout, stderr=Terminal()), stdout


def test_a_screen_is_drawn_over_the_one_before_and_cut_to_the_width() -> None:
    output, stdout = on_terminals()
    with redrawn(output) as draw:
        assert draw is not None
        draw([["step 1"], ["x" * 300]])
        draw([["step 2"], [("y" * 300, "bold")]])
    text = stdout.getvalue()
    first, _, second = text.partition("step 2")
    assert "\x1b[1A" in first, "the cursor goes up to the screen before"
    assert re.search(r"x{99}…", first) and "y" * 99 + "…" in second
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor stays hidden"


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.QUIET])
def test_for_programs_nothing_is_drawn_on_a_terminal_either(mode: Mode) -> None:
    output, stdout = on_terminals(mode)
    with redrawn(output) as draw:
        assert draw is None
    assert stdout.getvalue() == ""


def test_lines_go_to_a_pipe_whole() -> None:
    stdout = io.StringIO()
    output = Output(stdout=stdout, stderr=Terminal())
    with redrawn(output) as draw:
        assert draw is None
    show_lines([["a ", ("b" * 300, "bold")], []], output)
    assert stdout.getvalue() == f"a {'b' * 300}\n\n"
