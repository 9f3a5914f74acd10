"""`miles note`: what you want to remember of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands.find_run import find_run
from milescli.commands.options import RunArgument, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles note quickstart-1 'three times the learning rate #sweep'",
    "miles note quickstart-1       # show it",
    "miles note quickstart-1 ''    # remove it",
]


@verb("note", examples=EXAMPLES)
def note(
    context: typer.Context,
    run: RunArgument,
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", help="The new note; none: show it.", show_default=False),
    ] = None,
) -> None:
    """Write a note about a run, or show it. Words that begin with # are tags. `miles runs` and the
    page list notes, and the page searches them."""
    folder = find_run(run)
    from milescli.checkpoint.run_control import TAG, read_note, write_note
    from milescli.checkpoint.run_dir import open_run

    output: Output = context.obj
    opened = open_run(folder)
    if text is not None:
        write_note(opened, text)
    saved = read_note(opened)
    output.json("note", {"run": opened.name, "note": saved, "tags": TAG.findall(saved)})
    if saved:
        output.text(saved)
    else:
        output.note(f"run `{opened.name}` has no note")
