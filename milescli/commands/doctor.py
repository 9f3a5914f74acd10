"""`miles doctor`: is this machine ready."""

from __future__ import annotations

import typer

from milescli.commands.options import OptionalRecipeOption, SetOption, here, verb
from milescli.console.output import Output

EXAMPLES = ["miles doctor", "miles doctor --recipe quickstart", "miles doctor --json"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "doctor", examples=EXAMPLES)(doctor)


def doctor(context: typer.Context, *, recipe: OptionalRecipeOption = None, sets: SetOption = None) -> None:
    """Check this machine, each finding with the command that mends it. Ends with 4 where something fails."""
    from milescli.recipe.load import load

    output: Output = context.obj
    loaded = load(recipe, sets=sets or [], **here()) if recipe else None
    from milescli.doctor.run import run_doctor

    raise typer.Exit(run_doctor(loaded, output=output))
