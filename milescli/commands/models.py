"""`miles models`: families and what each can do here; one model in numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands.options import verb
from milescli.console.output import Output

EXAMPLES = ["miles models", "miles models Qwen/Qwen3-30B-A3B", "miles models ./my-model --json"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "models", examples=EXAMPLES)(models)


def models(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a config.json or a name on the hub: tell its numbers.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the model families with what was measured of each, or show the numbers of one model."""
    from milescli.commands.show.listings import show_families, show_numbers
    from milescli.listings.models import families, numbers

    output: Output = context.obj
    if model is None:
        show_families(families(), output=output)
    else:
        show_numbers(numbers(model), output=output)
