"""`miles models`: families and what each can do here; one model in numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milescli.commands.options import verb
from milescli.console.output import Output

EXAMPLES = [
    "miles models",
    "miles models Qwen/Qwen3-30B-A3B",
    "miles models ./my-model --json",
    "miles models check ./my-model",
]
CHECK = "check"


@verb("models", examples=EXAMPLES, is_page=True)
def models(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a config.json or a name on the hub to describe; or `check`.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="After `check`: the Hugging Face folder to test on this machine.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the supported model families with their measurements, or show the numbers of one model.
    Or check a folder on this machine: tensor names, both conversions, logits against transformers,
    an engine against the trainer, memory. The check exits with 1 if something fails."""
    from milescli.commands.show.listings import show_families, show_numbers
    from milescli.listings.models import families, numbers

    output: Output = context.obj
    if (model == CHECK) != (folder is not None):
        raise typer.BadParameter("to check a folder, use `miles models check FOLDER`")
    if folder is not None:
        from milescli.doctor.model_check import run_model_check

        raise typer.Exit(run_model_check(folder, output=output))
    if model is None:
        show_families(families(), output=output)
    else:
        show_numbers(numbers(model), output=output)
