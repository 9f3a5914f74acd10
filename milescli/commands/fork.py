"""`miles fork`: a new run that begins with a checkpoint of another."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands.find_run import find_run
from milescli.commands.options import (
    CheckpointStepOption,
    RunArgument,
    SetOption,
    StepsOption,
    verb,
)
from milescli.console.output import Output

EXAMPLES = [
    "miles fork quickstart-1 --step 20 --name hot --set train.optimizer.lr=2e-3",
    "miles fork quickstart-1 --steps 80",
]
NameOption = Annotated[
    str | None, typer.Option("--name", "-n", help="Name of the new run; RUN-fork-1 by default.")
]


@verb("fork", examples=EXAMPLES)
def fork(
    context: typer.Context,
    run: RunArgument,
    *,
    step: CheckpointStepOption = None,
    name: NameOption = None,
    steps: StepsOption = None,
    sets: SetOption = None,
) -> None:
    """Create a run that continues from a checkpoint of another: same weights, optimizer, data
    position and random state. You may change how it learns from there, but not its model, data or
    precision."""
    folder = find_run(run)
    from milescli.core.units import format_bytes
    from milescli.runtime import fork as forking

    output: Output = context.obj
    made = forking.fork(folder, step=step, name=name, steps=steps, sets=sets or [], output=output)
    for line in made.changed:
        output.note(line)
    shared = f"{format_bytes(made.linked_bytes)} shared with {folder.name} by hard links"
    if made.copied_bytes:
        shared += (
            f", {format_bytes(made.copied_bytes)} copied, because the file system refuses links"
        )
    output.json(
        "fork",
        {
            "run": str(made.run.path),
            "step": made.step,
            "steps": made.num_steps,
            "changed": made.changed,
            "linked_bytes": made.linked_bytes,
            "copied_bytes": made.copied_bytes,
        },
    )
    output.success(f"run {made.run.name} starts after step {made.step}: {shared}")
    more = "" if made.step < made.num_steps else f" --steps {2 * made.num_steps}"
    output.note(f"continue it: miles resume {made.run.typed}{more}")
