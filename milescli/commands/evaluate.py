"""`miles eval`: measure a run's checkpoint on held-out prompts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from milescli.commands.find_run import find_run
from milescli.commands.options import AddressOption, CheckpointStepOption, RunArgument, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles eval quickstart-1",
    "miles eval quickstart-1 --step 20 --num-prompts 50",
    "miles eval quickstart-1 --data test.jsonl",
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "eval", examples=EXAMPLES)(evaluate)


def evaluate(
    context: typer.Context,
    run: RunArgument,
    *,
    step: CheckpointStepOption = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", min=1, help="The first N prompts only.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Other prompts: .jsonl or .parquet.")
    ] = None,
    address: AddressOption = None,
) -> None:
    """Measure a run on its held-out prompts, or on others."""
    folder = find_run(run)
    from milescli.commands.show_summary import show_eval
    from milescli.runtime.evaluate import evaluate_run

    output: Output = context.obj
    done = evaluate_run(
        folder,
        step=step,
        num_prompts=num_prompts,
        data=data,
        address=address,
        environ=os.environ,
        output=output,
    )
    show_eval(done, run=folder, output=output)
