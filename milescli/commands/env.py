"""`miles env`, `miles envs` and `miles tools`: list, check, play and install what a policy can act
in and call."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands.options import Group, SetOption, verb
from milescli.console.output import Output

CHECK_EXAMPLES = [
    "miles env check frozen_lake --data task:frozen_lake",
    "miles env check gymnasium --settings '{id: FrozenLake-v1}'",
    "miles env check mypkg.games:Chess",
]
PLAY_EXAMPLES = [
    "miles env play frozen_lake --data task:frozen_lake --row 3",
    "miles env play frozen_lake --model quickstart-game-1",
    "miles env play frozen_lake --model http://127.0.0.1:30000/v1",
]
PAGE = """\
miles env: test an environment before a model uses it

  miles envs                  list the environments
  miles env check NAME        check that an environment meets its contract
  miles env play NAME         play it yourself, or watch a model play
  miles env install NAME      install the environments of another package
"""
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A name from `miles envs`, or mypkg.module:name.")
]
SettingsOption = Annotated[
    str, typer.Option("--settings", help="Arguments of the environment, as a YAML mapping.")
]
DataOption = Annotated[
    str | None,
    typer.Option("--data", help="Rows to start episodes from: task:NAME or a .jsonl file."),
]


GROUP = Group("env", about="Test an environment before a model uses it.", page=PAGE)


@verb("check", examples=CHECK_EXAMPLES, group=GROUP)
def check(
    context: typer.Context,
    name: NameArgument,
    settings: SettingsOption = "{}",
    data: DataOption = None,
) -> None:
    """Play random episodes, each of them twice. Exits with 3 if the environment is not
    deterministic for a seed, returns invalid steps, exceeds its range of rewards, or leaks
    resources."""
    from milescli.commands.show.listings import settings_of, show_checked_environment
    from milescli.listings.environments import check_environment

    show_checked_environment(
        name, check_environment(name, settings_of(settings), data), output=context.obj
    )


@verb("play", examples=PLAY_EXAMPLES, group=GROUP)
def play(
    context: typer.Context,
    name: NameArgument,
    settings: SettingsOption = "{}",
    data: DataOption = None,
    row: Annotated[
        int,
        typer.Option("--row", min=1, help="Number of the row (or of the episode) to play, from 1."),
    ] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="RUN, RUN@STEP, a folder, a hub name or an endpoint's URL; without it, you play.",
        ),
    ] = None,
    max_turns: Annotated[
        int, typer.Option("--max-turns", min=1, help="Maximum number of turns.")
    ] = 32,
    sets: SetOption = None,
) -> None:
    """Play one episode yourself, or let a model play it (this starts engines)."""
    from milescli.commands.play_environment import PlayOptions, play_one

    options = PlayOptions(name, settings, data, row, model, max_turns, sets or ())
    play_one(options, output=context.obj)


INSTALL_EXAMPLES = [
    "miles env install verifiers",
    "miles env install openenv --python /usr/bin/python3.12",
]


@verb("install", examples=INSTALL_EXAMPLES, group=GROUP)
def install(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The package: verifiers, openenv or harbor.")
    ],
    python: Annotated[
        str | None,
        typer.Option(
            "--python",
            help="Python interpreter to use; by default, miles searches for a compatible one.",
        ),
    ] = None,
) -> None:
    """Install a package of environments in its own virtual environment, because its requirements
    conflict with those of miles. Does nothing if it is already installed."""
    from milescli.agents.foreign.install import install as installed
    from milescli.agents.foreign.packages import package_named
    from milescli.commands.show.listings import show_installed

    output: Output = context.obj
    done = installed(package_named(name), python=python, say=output.note)
    show_installed(done, output=output)


@verb("envs", examples=["miles envs", "miles envs --json"], is_page=True)
def envs(context: typer.Context) -> None:
    """List the environments that a policy can act in."""
    from milescli.agents.foreign.packages import list_packages
    from milescli.commands.show.listings import show_items
    from milescli.listings.environments import environments

    show_items("environments", environments(), packages=list_packages(), output=context.obj)


@verb("tools", examples=["miles tools"], is_page=True)
def tools(context: typer.Context) -> None:
    """List the tools that a policy can call."""
    from milescli.commands.show.listings import show_items
    from milescli.listings.environments import tools as listed

    show_items("tools", listed(), output=context.obj)
