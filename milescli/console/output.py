"""Prints all output of the program: data on stdout, messages on stderr, in the mode that the user
chose. Every command prints through it."""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import groupby
from typing import IO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from milescli.console import theme
from milescli.core.errors import MilesError
from milescli.core.files import parse_json

JSON_SCHEMA = 1
"""Incremented when a field of the JSON output changes its meaning or is removed."""

PIPE_WIDTH = 160
"""Columns if the output is not a terminal, so that nothing is cut to fit a screen."""


class Mode(StrEnum):
    """Names the output modes."""

    HUMAN = "human"
    JSON = "json"
    """One JSON object per line: results on stdout, narration and errors on stderr."""
    QUIET = "quiet"
    """Bare data on stdout, and only warnings and errors of the narration."""


class Output:
    """Prints all output. Text from users is never read as markup."""

    def __init__(
        self,
        mode: Mode = Mode.HUMAN,
        *,
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
    ) -> None:
        """Set the mode. `stdout` and `stderr` replace the process's own streams in tests."""
        self.mode = mode
        self._begun = ""
        """Text that `piece` has printed so far."""
        self.data = _console(stdout if stdout is not None else sys.stdout)
        self.narration = _console(stderr if stderr is not None else sys.stderr)

    @property
    def is_interactive(self) -> bool:
        """Return True if the narration's terminal can redraw: only then a live panel is drawn."""
        return self.narration.is_terminal and not self.narration.is_dumb_terminal

    @property
    def is_watched(self) -> bool:
        """Return True if a person reads the data on a terminal."""
        return self.mode is Mode.HUMAN and self.data.is_terminal

    def json(self, kind: str, payload: Mapping[str, object]) -> None:
        """Print one line, in JSON mode only: `{"schema": 1, "kind": kind, ...payload}`."""
        if self.mode is Mode.JSON:
            self._json(self.data, kind, payload)

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = ""
    ) -> None:
        """Print rows as data; in quiet mode tab-separated, without a header. Prints nothing in JSON
        mode: use `json` there."""
        if self.mode is Mode.QUIET:
            for row in rows:
                self._line(self.data, "\t".join(_plain(cell) for cell in row))
        elif self.mode is Mode.HUMAN:
            grid = Table(
                box=None,
                pad_edge=False,
                padding=(0, 3, 0, 0),
                header_style=theme.HEADER,
                title_justify="left",
            )
            for place, column in enumerate(columns):
                cells = [row[place] for row in rows if row[place] is not None]
                is_number = bool(cells) and all(isinstance(cell, int | float) for cell in cells)
                grid.add_column(column, justify="right" if is_number else "left", overflow="fold")
            for row in rows:
                grid.add_row(*(_cell(cell) for cell in row))
            if title:
                self.data.print(Text(title, style=theme.TITLE))
            self._show(grid)

    def kv(self, pairs: Mapping[str, object], *, title: str = "") -> None:
        """Print names and values; in quiet mode tab-separated. Prints nothing in JSON mode."""
        if self.mode is Mode.QUIET:
            for name, value in pairs.items():
                self._line(self.data, f"{name}\t{_plain(value)}")
        elif self.mode is Mode.HUMAN:
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(style=theme.LABEL, no_wrap=True)
            grid.add_column(overflow="fold")
            for name, value in pairs.items():
                grid.add_row(name, _cell(value))
            if title:
                self.data.print(Text(title, style=theme.TITLE))
            self._show(Padding(grid, (0, 0, 0, 2)) if title else grid)

    def text(self, text: str) -> None:
        """Print data that is already text, such as a recipe or a help page, or the rest of a text
        that `piece` began. Prints nothing in JSON mode."""
        if self.mode is not Mode.JSON:
            self._line(self.data, text.removeprefix(self._begun).rstrip("\n"))
            self._begun = ""

    def piece(self, text: str) -> None:
        """Print a piece of a text at once; `text` prints the rest. Prints nothing in JSON mode."""
        if self.mode is not Mode.JSON:
            self._begun += text
            self.data.file.write(text)
            self.data.file.flush()

    def masked(self, pieces: Sequence[tuple[str, bool]]) -> None:
        """Print text in pieces, some of which are trained on: those are coloured, and every other
        piece of either kind is underlined, so that the borders are visible. Without colours, double
        angle brackets enclose the trained pieces."""
        if self.mode is Mode.JSON:
            return
        if self.data.is_terminal and not self.data.no_color:
            styles = ((theme.QUIET, f"{theme.QUIET} underline"), (theme.GOOD, theme.LEARNED))
            line = Text.assemble(
                *((text, styles[learned][at % 2]) for at, (text, learned) in enumerate(pieces))
            )
            self.data.print(line, soft_wrap=True)
            return
        runs = groupby(pieces, key=lambda piece: piece[1])
        parts = [(learned, "".join(text for text, _ in run)) for learned, run in runs]
        self._line(self.data, "".join(f"«{text}»" if learned else text for learned, text in parts))

    def blank(self) -> None:
        """Print an empty line between parts of the data; for people only."""
        if self.mode is Mode.HUMAN:
            self.data.print()

    def note(self, text: str) -> None:
        """Print a note."""
        self._narrate("note", text, Text(text, style=theme.QUIET))

    def success(self, text: str) -> None:
        """Print a success."""
        self._narrate("success", text, Text.assemble(("✓ ", theme.GOOD), text))

    def warn(self, text: str) -> None:
        """Warn of something that the user may not have intended. Also printed in quiet mode."""
        self._narrate(
            "warning", text, Text.assemble(("warning: ", theme.WARN), text), is_important=True
        )

    def error(self, error: MilesError) -> None:
        """Print what, why and fix; in JSON mode one JSON object on stderr."""
        if self.mode is Mode.JSON:
            fields = error.as_dict()
            self._json(self.narration, "error", {"type": fields.pop("kind"), **fields})
            return
        self._labelled("error: ", error.what, style=theme.BAD)
        self._labelled("  why: ", error.why, style=theme.LABEL)
        for place, fix in enumerate(error.fixes):
            self._labelled(
                "   or: " if place else "  fix: ", fix, style=theme.LABEL, body=theme.COMMAND
            )

    def show_cursor(self) -> None:
        """Show the cursor again, if a process died while it had hidden it."""
        if self.is_interactive:
            self.narration.show_cursor(True)

    def next_steps(self, commands: Mapping[str, str]) -> None:
        """Print commands to paste, each with its meaning."""
        if self.mode is not Mode.HUMAN:
            return
        width = max(len(command) for command in commands)
        self.narration.print(Text("next", style=theme.LABEL))
        for command, meaning in commands.items():
            line = Text.assemble(
                ("  ", ""), (command.ljust(width), theme.COMMAND), (f"   {meaning}", theme.QUIET)
            )
            self.narration.print(line, soft_wrap=True)

    def _labelled(self, label: str, text: str, *, style: str, body: str = "") -> None:
        indent = "\n" + " " * len(label)
        line = Text.assemble((label, style), (text.rstrip().replace("\n", indent), body))
        self.narration.print(line, soft_wrap=True)

    def _narrate(self, kind: str, text: str, pretty: Text, *, is_important: bool = False) -> None:
        if self.mode is Mode.JSON:
            self._json(self.narration, kind, {"text": text})
        elif self.mode is Mode.HUMAN or is_important:
            self.narration.print(pretty, soft_wrap=True)

    def _show(self, drawing: RenderableType) -> None:
        """Print a drawing; if stdout is not a terminal, without trailing blanks."""
        if self.data.is_terminal:
            self.data.print(drawing)
            return
        with self.data.capture() as captured:
            self.data.print(drawing)
        for line in captured.get().splitlines():
            self._line(self.data, line.rstrip())

    def _json(self, console: Console, kind: str, payload: Mapping[str, object]) -> None:
        """Print one JSON line; escape what the stream cannot encode, so that nothing is lost."""
        line = envelope(kind, payload)
        try:
            line.encode(console.encoding)
        except UnicodeEncodeError:
            line = json.dumps(parse_json(line))
        self._line(console, line)

    def _line(self, console: Console, text: str) -> None:
        """Print a line unchanged, without wrapping or colours."""
        console.file.write(text + "\n")
        console.file.flush()


def envelope(kind: str, payload: Mapping[str, object]) -> str:
    """Return one line of strict JSON (see `finite`)."""
    return json.dumps(
        {"schema": JSON_SCHEMA, "kind": kind, **finite(dict(payload))},
        ensure_ascii=False,
        default=str,
    )  # type: ignore[dict-item]


def finite(value: object) -> object:
    """Replace NaN and infinity, which JSON lacks, by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


_PLAIN = "plain"
"""Name of the error handler that replaces characters that a stream cannot encode."""
_DRAWN = (
    dict.fromkeys("█▇▆▅▄▃▂▁▀", "#")
    | dict.fromkeys("░▒▓", ".")
    | {
        "✓": "+",
        "✗": "x",
        "\u00d7": "x",
        "…": "...",
        "«": "<<",
        "»": ">>",
        "─": "-",
        "━": "=",
        "│": "|",
    }
    | {"·": ".", "\u2013": "-", "\u2014": "-", "\u2018": "'", "\u2019": "'", "“": '"', "”": '"'}
)
"""Characters that miles prints beyond ASCII -> replacements. Corners of boxes become `+`."""


def _replace_unencodable(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace what a stream cannot encode: our own drawings by ASCII, bytes of names that are not
    valid text by themselves, and everything else by a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    piece = error.object[error.start]
    if "\udc80" <= piece <= "\udcff":
        return bytes([ord(piece) - 0xDC00]), error.start + 1
    corner = "+" if "─" <= piece <= "╿" else "?"
    return _DRAWN.get(piece, corner), error.start + 1


codecs.register_error(_PLAIN, _replace_unencodable)


def _console(stream: IO[str]) -> Console:
    """Make a console with colours only on a terminal, whatever GITHUB_ACTIONS or FORCE_COLOR say,
    and none with NO_COLOR. From now on, printing to the stream never fails because its encoding
    lacks a character, whoever prints."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=_PLAIN)
    is_terminal = stream.isatty()
    return Console(
        file=stream,
        force_terminal=is_terminal,
        no_color=bool(os.environ.get("NO_COLOR")) or None,
        width=None if is_terminal else PIPE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )


def _plain(cell: object) -> str:
    return "" if cell is None else str(cell)


def _cell(cell: object) -> Text:
    if isinstance(cell, Text):
        return cell
    return Text("-", style=theme.QUIET) if cell is None else Text(str(cell))


Piece = str | tuple[str, str]
"""Text, or text and a style of `theme`."""
Line = Sequence[Piece]


def show_lines(lines: Sequence[Line], output: Output) -> None:
    """Print the lines to stdout once."""
    for line in lines:
        output.data.print(Text.assemble(*line), soft_wrap=True)


@contextmanager
def redrawn(output: Output) -> Iterator[Callable[[Sequence[Line]], None] | None]:
    """Provide a function that replaces the screen; None if there is no terminal, or the mode is not
    for people."""
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
