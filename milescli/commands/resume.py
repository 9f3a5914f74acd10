"""`miles resume`: go on with a run from its newest checkpoint."""

from __future__ import annotations

import os

import typer

from milescli.commands.find_run import find_run
from milescli.commands.options import AddressOption, RunArgument, SetOption, StepsOption, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles resume quickstart-1",
    "miles resume quickstart-1 --steps 80",
    "miles resume quickstart-1 --set parallel.tp=2",
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "resume", examples=EXAMPLES)(resume)


def resume(
    context: typer.Context,
    run: RunArgument,
    *,
    steps: StepsOption = None,
    sets: SetOption = None,
    address: AddressOption = None,
) -> None:
    """Go on with a run that was stopped, or train it further.

    Where it runs may change (machine, run, parallel, engines); what it learns may not, except for
    --steps.
    """
    folder = find_run(run)
    from milescli.commands.show_summary import show_run_summary
    from milescli.runtime.resume import resume as go_on

    output: Output = context.obj
    done = go_on(
        folder, steps=steps, sets=sets or [], address=address, environ=os.environ, output=output
    )
    show_run_summary(done, output=output)
