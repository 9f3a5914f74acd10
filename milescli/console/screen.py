"""Lines of styled pieces: how a screen of figures is said. Where it is watched, cut to the
width of the terminal and drawn in place. Made by commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.live import Live
from rich.text import Text

from milescli.console.output import Mode, Output

Piece = str | tuple[str, str]
"""Text, or text and a style of `theme`."""
Line = Sequence[Piece]


def show_lines(lines: Sequence[Line], output: Output) -> None:
    """Once."""
    for line in lines:
        output.data.print(Text.assemble(*line), soft_wrap=True)


@contextmanager
def redrawn(output: Output) -> Iterator[Callable[[Sequence[Line]], None] | None]:
    """What draws a screen in the place of the one before. None where there is no terminal, or
    nobody who looks at it."""
    if output.mode is not Mode.HUMAN or not (output.is_interactive and output.data.is_terminal):
        yield None
        return
    with Live(console=output.data, auto_refresh=False) as live:

        def draw(lines: Sequence[Line]) -> None:
            shown = [Text.assemble(*line) for line in lines]
            for line in shown:
                line.truncate(output.data.width, overflow="ellipsis")
            live.update(Text("\n").join(shown), refresh=True)

        yield draw
