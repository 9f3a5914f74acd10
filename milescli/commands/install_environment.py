"""`miles env install`: a package of environments in a virtual environment of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands.options import verb
from milescli.console.output import Output

EXAMPLES = [
    "miles env install verifiers",
    "miles env install openenv --python /usr/bin/python3.12",
]


def register(group: typer.Typer) -> None:
    """Add the verb."""
    verb(group, "install", examples=EXAMPLES)(install)


def install(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="verifiers, openenv or harbor.")],
    python: Annotated[
        str | None,
        typer.Option("--python", help="An interpreter for it; else one that fits is looked for."),
    ] = None,
) -> None:
    """Install a package of environments in a virtual environment of its own, as its requirements
    clash with ours. Done before: nothing happens."""
    from milescli.agents.foreign.install import install as installed
    from milescli.agents.foreign.packages import package_named
    from milescli.commands.show_environments import show_installed

    output: Output = context.obj
    done = installed(package_named(name), python=python, say=output.note)
    show_installed(done, output=output)
