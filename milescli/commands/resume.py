"""`miles resume`: go on with a run from its newest checkpoint."""

from __future__ import annotations

import typer

from milescli.commands.driving import SupervisedOption, drive, resume_run
from milescli.commands.find_run import fetch_run, find_run, find_sweep
from milescli.commands.options import AddressOption, ResumedArgument, SetOption, StepsOption, verb
from milescli.console.output import Output
from milescli.recipe.store_url import is_store_url

EXAMPLES = [
    "miles resume quickstart-1",
    "miles resume quickstart-1 --steps 80",
    "miles resume quickstart-1 --set parallel.tp=2",
    "miles resume quickstart-1 --supervised",
    "miles resume s3://bucket/runs/quickstart-1",
]


@verb("resume", examples=EXAMPLES)
def resume(
    context: typer.Context,
    run: ResumedArgument,
    *,
    steps: StepsOption = None,
    sets: SetOption = None,
    address: AddressOption = None,
    supervised: SupervisedOption = False,
) -> None:
    """Continue a stopped run or sweep, or train a finished run further. You may change where a run
    happens (machine, run, parallel, engines), but not what it learns, except for --steps."""
    output: Output = context.obj
    if (sweep := find_sweep(run)) is not None:
        from milescli.commands.sweep import run_and_show

        if steps or sets or address or supervised:
            raise typer.BadParameter("a sweep is continued without options: sweep.yaml has them")
        run_and_show(sweep, output=output)
        return
    folder = None if is_store_url(run) else find_run(run)

    def work() -> None:
        found = folder or fetch_run(run, output=output)
        resume_run(found, output=output, steps=steps, sets=sets, address=address)

    drive(work, output=output, supervised=supervised)
