"""`miles plugins`: what can be brought by the user."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from milescli.commands.options import verb
from milescli.console.output import Output

EXAMPLES = [
    "miles plugins",
    "miles plugins new reward my_reward",
    "miles plugins check my_reward:my_reward",
]


class Action(StrEnum):
    """Names the actions on plug-ins."""

    LIST = "list"
    NEW = "new"
    CHECK = "check"


@verb("plugins", examples=EXAMPLES, is_page=True)
def plugins(
    context: typer.Context,
    action: Annotated[
        Action,
        typer.Argument(help="List the plug points, write a new plug-in, or check one."),
    ] = Action.LIST,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND|PATH]",
            help="new: the kind of plug-in; check: `module:name`.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="new: the name of the file; check: the kind of plug-in.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the plug points with their recipe keys and signatures, write a template for a plug-in,
    or check that a plug-in meets its contract."""
    from milescli.commands.show.listings import show_checked_plugin, show_points, show_written
    from milescli.core.plug_points import POINTS
    from milescli.listings import plugins as listing

    output: Output = context.obj
    if action is Action.LIST:
        show_points(POINTS, output=output)
    elif what is None:
        raise typer.BadParameter(
            f"add its name and kind, for example: {EXAMPLES[1 + (action is Action.CHECK)]}"
        )
    elif action is Action.NEW:
        point = listing.point_of(what)
        files = listing.write_plugin(point, name or f"my_{point.kind}", Path.cwd())
        show_written(point, files, output=output)
    else:
        point = listing.point_of(name) if name else listing.point_that_fits(what)
        listing.check(point, what)
        show_checked_plugin(point, what, output=output)
