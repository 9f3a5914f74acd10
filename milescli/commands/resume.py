"""`miles resume`: go on with a run from its newest checkpoint."""

from __future__ import annotations

import typer

from milescli.commands.driving import SupervisedOption, drive, go_on_with
from milescli.commands.find_run import find_run
from milescli.commands.options import AddressOption, RunArgument, SetOption, StepsOption, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles resume quickstart-1",
    "miles resume quickstart-1 --steps 80",
    "miles resume quickstart-1 --set parallel.tp=2",
    "miles resume quickstart-1 --supervised",
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
    supervised: SupervisedOption = False,
) -> None:
    """Continue a stopped run, or train a finished run further. You may change where it runs
    (machine, run, parallel, engines), but not what it learns, except for --steps."""
    folder = find_run(run)
    output: Output = context.obj
    drive(
        lambda: go_on_with(folder, output=output, steps=steps, sets=sets, address=address),
        output=output,
        supervised=supervised,
    )
