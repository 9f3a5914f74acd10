"""`miles doctor`: is this machine ready."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands.options import OptionalRecipeOption, SetOption, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles doctor",
    "miles doctor --recipe quickstart",
    "miles doctor --address 10.0.0.1:6379 --recipe my.yaml",
    "miles doctor --json",
]

AddressOption = Annotated[
    str | None,
    typer.Option("--address", help="Check every node of this Ray cluster, too (machine.address)."),
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "doctor", examples=EXAMPLES)(doctor)


def doctor(
    context: typer.Context,
    *,
    recipe: OptionalRecipeOption = None,
    sets: SetOption = None,
    address: AddressOption = None,
) -> None:
    """Check this machine, or each node of a Ray cluster; each finding with the command that mends
    it. Ends with 4 where something fails."""
    from milescli.doctor.fixes import DoctorOptions
    from milescli.doctor.run import run_doctor

    if sets and recipe is None:
        raise typer.BadParameter("--set changes a recipe: name it with --recipe")
    output: Output = context.obj
    options = DoctorOptions(recipe=recipe, sets=sets or [], address=address)
    raise typer.Exit(run_doctor(options, output=output))
