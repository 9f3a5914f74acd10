"""`miles simulate`: how fast a recipe would run on a machine that is not there, by layout and
asynchronous setting."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.options import (
    RecipeArgument,
    RecipeOption,
    SetOption,
    flags_of,
    read_recipe,
    verb,
)

EXAMPLES = [
    "miles simulate --recipe qwen2.5-7b --on 16x8xH100 --price-per-gpu-hour 2.5",
    "miles simulate --recipe qwen3-4b --on 8xH200 --assume response_tokens=2500",
    "miles simulate --recipe quickstart --from quickstart-1",
]


@verb("simulate", examples=EXAMPLES)
def simulate(
    context: typer.Context,
    wanted: RecipeArgument = None,
    *,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="MACHINE|FILE", help="Such as 128x8xH100; default: this."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Take lengths and speeds of this finished run.",
            autocompletion=suggest.runs,
        ),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            "--assume", metavar="KEY=VALUE", help="Set a figure that is assumed; repeatable."
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price-per-gpu-hour", min=0.0, help="Also show what the run would cost."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option("--window", min=6, max=1000, help="Steps to simulate of each candidate."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed.")] = 0,
) -> None:
    """Predict throughput, idle time, staleness and cost of a recipe on a machine, for several
    layouts and asynchronous settings, and recommend one. Nothing is started."""
    from milescli.commands.show.simulation import SimulationOptions, show_simulation
    from milescli.platform.machine import read_machine

    machine = None if on is None else read_machine(on)
    flags = flags_of(machine__nodes=("--nodes", len(machine.nodes) if machine else None))
    loaded = read_recipe(wanted, recipe, sets=sets, flags=flags, adapters=None, output=context.obj)
    options = SimulationOptions(
        loaded=loaded,
        sets=sets or [],
        flags=flags,
        machine=machine,
        run=run,
        assume=assume or [],
        price=price,
        window=window,
        seed=seed,
    )
    show_simulation(options, output=context.obj)
