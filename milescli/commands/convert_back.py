"""`miles convert megatron-to-hf`: a checkpoint becomes a folder that other programs load."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands.command_line import typed
from milescli.commands.convert_options import DryRunOption, DtypeOption, Target, VerifyOption
from milescli.commands.options import verb
from milescli.console.output import Output
from milescli.core.units import parse_size

EXAMPLES = [
    "miles convert megatron-to-hf qwen3-megatron qwen3-hf",
    "miles convert megatron-to-hf runs/quickstart-1/checkpoints/step_20 out --max-shard-size 2GB",
    "miles convert megatron-to-hf iter_0000100 out --model Qwen/Qwen3-0.6B",
]


def register(group: typer.Typer) -> None:
    """Add the verb."""
    verb(group, "megatron-to-hf", examples=EXAMPLES)(megatron_to_hf)


def megatron_to_hf(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint, a converted model, a run or its step.",
            show_default=False,
        ),
    ],
    target: Target,
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Folder or hub name with the config.json, if SRC has none."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Of a run; the newest by default.")
    ] = None,
    dtype: DtypeOption = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", help="5GB, 500MB; as the model came by default."),
    ] = None,
    verify: VerifyOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Write a Hugging Face folder that transformers and SGLang load."""
    shard_bytes = _size(max_shard_size)
    from milescli.commands.show_convert import show_conversion, show_preview
    from milescli.conversion.convert import convert
    from milescli.conversion.preview import preview
    from milescli.conversion.to_hf import ToHf

    output: Output = context.obj
    direction = ToHf(
        source=source, model=model, step=step, dtype=dtype and dtype.value, shard_bytes=shard_bytes
    )
    if dry_run:
        show_preview(preview(direction, target, output=output), output=output)
    else:
        done = convert(direction, target, command=typed(), verify=verify, output=output)
        show_conversion(done, output=output)


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-shard-size") from None
