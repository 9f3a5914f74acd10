"""Lines of styled pieces: how a screen of figures is said. Cut to the width of a terminal; redrawn
in place where it is watched. Made by commands."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.live import Live
from rich.text import Text

from milescli.console.output import Output

Piece = str | tuple[str, str]
"""Text, or text and a style of `theme`."""
Line = Sequence[Piece]


class Screen:
    """Shows lines once, or again and again.

    with Screen(output, is_watched=True) as screen:
        screen.show(lines)
    """

    def __init__(self, output: Output, *, is_watched: bool = False) -> None:
        self.output = output
        self._is_drawn = is_watched and output.is_interactive and output.data.is_terminal
        self._live: Live | None = None

    @property
    def width(self) -> int:
        """Columns."""
        return self.output.data.width

    @property
    def redraws(self) -> bool:
        """It is a terminal that is drawn in place; else each frame would be said anew."""
        return self._is_drawn

    def __enter__(self) -> Screen:
        if self._is_drawn:
            self._live = Live(console=self.output.data, auto_refresh=False, screen=False)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, lines: Sequence[Line]) -> None:
        """The whole screen."""
        shown = [_text(line) for line in lines]
        if self._live is not None:
            for line in shown:
                line.truncate(self.width, overflow="ellipsis")
            self._live.update(Text("\n").join(shown), refresh=True)
            return
        for line in shown:
            self.output.data.print(line, soft_wrap=True)


def _text(line: Line) -> Text:
    return Text.assemble(*line)
