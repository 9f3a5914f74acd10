"""`miles algorithms`: what `train.algorithm` can be."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.options import fixes_in_words_of, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles algorithms",
    "miles algorithms gspo",
    "miles launch --recipe quickstart --set train.algorithm=gspo",
]


@verb("algorithms", examples=EXAMPLES, is_page=True)
def algorithms(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show everything that this algorithm sets.",
            autocompletion=suggest.algorithms,
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the RL algorithms with their pieces and papers, or show one."""
    from milescli.commands.show.listings import show_algorithm, show_algorithms
    from milescli.listings.algorithms import algorithm_rows
    from milescli.recipe.algorithms import settings_of

    output: Output = context.obj
    if name is None:
        show_algorithms(algorithm_rows(), output=output)
        return
    with fixes_in_words_of("miles algorithms ", instead_of="--set train.algorithm="):
        settings_of(name)  # refuses a name that is none
    show_algorithm(next(row for row in algorithm_rows() if row.name == name), output=output)
