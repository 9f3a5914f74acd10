"""`miles export`: turn a checkpoint into a folder that other programs load."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.find_run import find_weights
from milescli.commands.options import (
    BaseOption,
    CheckpointStepOption,
    ExportDtype,
    ExportRole,
    FormatOption,
    MergeOption,
    PrivateOption,
    PushOption,
    RoleOption,
    ToOption,
    verb,
)
from milescli.console.output import Output

EXAMPLES = [
    "miles export quickstart-1 --to my-model",
    "miles export quickstart-1 --to my-model-fp8 --format fp8 --push my-name/my-model-fp8",
    "miles export runs/quickstart-1/checkpoints/step_20 --to my-model --format fp32",
    "miles export my-adapter --to my-model --merge",
    "miles export quickstart-1 --to s3://bucket/my-model",
]


@verb("export", examples=EXAMPLES)
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
    to: ToOption,
    format: FormatOption = None,
    step: CheckpointStepOption = None,
    role: RoleOption = ExportRole.POLICY,
    base: BaseOption = None,
    merge: MergeOption = False,
    push: PushOption = None,
    private: PrivateOption = True,
    dtype: Annotated[ExportDtype | None, typer.Option("--dtype", hidden=True)] = None,
) -> None:
    """Write a Hugging Face folder, with a model card, that transformers and SGLang can load."""
    output: Output = context.obj
    if dtype is not None:
        output.warn(f"--dtype was renamed to --format: use --format {format or dtype.value}")
    folder = find_weights(source)
    output.note(f"opening {folder}")  # what comes next loads torch, which takes seconds
    from milescli.commands.show.summary import show_export
    from milescli.runtime.export import export_weights
    from milescli.runtime.uploading import destination

    chosen = format.value if format else dtype.value if dtype else None
    with destination(to, output=output) as place:
        summary = export_weights(
            folder,
            to=place.folder,
            deliver=place.deliver,
            format=chosen,
            step=step,
            role=role.value,
            base=base,
            merge=merge,
            push=push,
            private=private,
            output=output,
        )
    show_export(replace(summary, path=to), to=to, output=output)
