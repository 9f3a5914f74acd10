"""`miles why`: what ended a run, and what to do next."""

from __future__ import annotations

from dataclasses import asdict

import typer

from milescli.commands.find_run import find_run
from milescli.commands.options import RunArgument, verb
from milescli.console.output import Output

EXAMPLES = ["miles why quickstart-1", "miles why quickstart-1 --json"]


@verb("why", examples=EXAMPLES, is_page=True)
def why(context: typer.Context, run: RunArgument) -> None:
    """Explain why a run ended: which process died first, its log, memory, and what to do next."""
    folder = find_run(run)
    from milescli.autopsy.why import find_why, page
    from milescli.checkpoint.run_dir import open_run

    output: Output = context.obj
    cause = find_why(open_run(folder))
    output.json("why", asdict(cause))
    output.text(page(cause))
