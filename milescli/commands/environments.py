"""`miles envs` and `miles tools`: what a policy can act in, and call."""

from __future__ import annotations

import typer

from milescli.commands.options import verb


def register(app: typer.Typer) -> None:
    """Add both verbs."""
    verb(app, "envs", examples=["miles envs", "miles envs --json"])(envs)
    verb(app, "tools", examples=["miles tools"])(tools)


def envs(context: typer.Context) -> None:
    """List the environments that a policy can act in."""
    from milescli.agents.foreign.packages import listed
    from milescli.commands.show_environments import show_listed
    from milescli.listings.environments import environments

    show_listed("environments", environments(), packages=listed(), output=context.obj)


def tools(context: typer.Context) -> None:
    """List the tools that a policy can call."""
    from milescli.commands.show_environments import show_listed
    from milescli.listings.environments import tools as listed

    show_listed("tools", listed(), output=context.obj)
