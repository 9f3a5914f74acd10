"""`miles export`: turn a checkpoint into a folder that other programs load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.find_run import find_weights
from milescli.commands.options import CheckpointStepOption, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles export quickstart-1 --to my-model",
    "miles export quickstart-1 --to my-model-fp8 --format fp8 --push my-name/my-model-fp8",
    "miles export runs/quickstart-1/checkpoints/step_20 --to my-model --format fp32",
    "miles export my-adapter --to my-model --merge",
]


class Format(StrEnum):
    """In which numbers the weights are written."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    INT4 = "int4"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


class Dtype(StrEnum):
    """What --dtype took before --format was there."""

    BF16 = "bf16"
    FP32 = "fp32"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "export", examples=EXAMPLES)(export)


def export(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|DIR",
            help="A run, a checkpoint, a converted model, a Hugging Face folder or a LoRA adapter.",
            autocompletion=suggest.runs,
            show_default=False,
        ),
    ],
    *,
    to: Annotated[Path, typer.Option("--to", help="The folder to make.", show_default=False)],
    format: Annotated[
        Format | None,
        typer.Option(
            "--format", "-f", help="Numbers of the weights; as config.json says by default."
        ),
    ] = None,
    step: CheckpointStepOption = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="The model that an adapter or a bare checkpoint is of."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write an adapter into its base model.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="ORG/NAME", help="Upload it to the Hugging Face hub."),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private/--public", help="Who may see a repository that --push makes.")
    ] = True,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", hidden=True)] = None,
) -> None:
    """Write a Hugging Face folder that transformers and SGLang load, with a model card."""
    output: Output = context.obj
    if dtype is not None:
        output.warn(f"--dtype is called --format now: --format {format or dtype.value}")
    folder = find_weights(source)
    from milescli.commands.show_summary import show_export
    from milescli.runtime.export import export_weights

    chosen = format.value if format else dtype.value if dtype else None
    summary = export_weights(
        folder,
        to=to,
        format=chosen,
        step=step,
        base=base,
        merge=merge,
        push=push,
        private=private,
        output=output,
    )
    show_export(summary, to=to, output=output)
