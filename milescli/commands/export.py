"""`miles export`: turn a checkpoint into a folder that other programs load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from milescli.commands.find_run import find_run
from milescli.commands.options import CheckpointStepOption, RunArgument, verb
from milescli.console.output import Output

EXAMPLES = ["miles export quickstart-1 --to my-model", "miles export quickstart-1 --to my-model --step 20 --dtype fp32"]


class Dtype(StrEnum):
    """In which numbers the weights are written."""

    BF16 = "bf16"
    FP32 = "fp32"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "export", examples=EXAMPLES)(export)


def export(
    context: typer.Context,
    run: RunArgument,
    *,
    to: Annotated[Path, typer.Option("--to", help="The folder to make.", show_default=False)],
    step: CheckpointStepOption = None,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Numbers of the weights; as trained by default.")] = None,
) -> None:
    """Write a Hugging Face folder that transformers and SGLang load."""
    folder = find_run(run)
    from milescli.commands.show_summary import show_export
    from milescli.runtime.export import export_run

    output: Output = context.obj
    summary = export_run(folder, to=to, step=step, dtype=dtype.value if dtype else None, output=output)
    show_export(summary, to=to, output=output)
