"""`miles sweep`: search settings of a recipe in several runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from milescli.commands.options import DryRunOption, OnOption, PriceOption, planned_machine, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles sweep sweep.yaml --dry-run --on 8xH100 --price-per-gpu-hour 2.5",
    "miles sweep sweep.yaml",
    "miles resume my-sweep",
    "miles report my-sweep",
]


@verb("sweep", examples=EXAMPLES)
def sweep(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What to search: a .yaml file.", exists=False)
    ],
    *,
    dry_run: DryRunOption = False,
    on: OnOption = None,
    price: PriceOption = None,
) -> None:
    """Search settings of a recipe: run trials with different settings, compare them by their
    held-out accuracy, and write the recipe of the best. Each trial is a run like any other."""
    from milescli.backends.ray.tuning import require_packages
    from milescli.recipe.sweep import read_sweep
    from milescli.sweep.folder import create_sweep
    from milescli.sweep.planning import planned_trials

    output: Output = context.obj
    machine = planned_machine(on, price=price, dry_run=dry_run)
    wanted = read_sweep(file.expanduser())
    require_packages(wanted.settings.searcher)
    planned = planned_trials(
        wanted, cwd=Path.cwd(), machine=machine, checks_data=dry_run, output=output
    )
    if dry_run:
        from milescli.commands.show.sweep import show_planned

        show_planned(wanted, planned, price=price, output=output)
        return
    refused = sum(one.refusal is not None for one in planned)
    if refused:
        output.warn(f"{refused} of {len(planned)} trials cannot run, and are left out")
    folder = create_sweep(wanted, environ=os.environ, cwd=Path.cwd(), home=Path.home())
    output.note(f"sweep directory {folder.shown}, {wanted.num_trials} trials")
    run_and_show(folder.path, output=output)


def run_and_show(path: Path, *, output: Output) -> None:
    """Run the remaining trials of a sweep, and show what it found."""
    from milescli.backends.ray.tuning import require_packages
    from milescli.commands.show.sweep import show_results
    from milescli.sweep.folder import open_sweep
    from milescli.sweep.results import read_results, write_results
    from milescli.sweep.running import run_sweep

    folder = open_sweep(path)
    require_packages(folder.sweep.settings.searcher)
    try:
        run_sweep(folder, output=output)
    finally:
        result = read_results(folder)
        write_results(folder, result)
    show_results(folder, result, output=output)
