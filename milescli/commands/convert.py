"""`miles convert`: Hugging Face folders become Megatron checkpoints and back, each with its
proof."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milescli.commands.driving import typed_command
from milescli.commands.options import Group, verb
from milescli.console.output import Output
from milescli.conversion.verify import Verify
from milescli.core.units import parse_size

if TYPE_CHECKING:
    from milescli.conversion.base import Direction


class ConvertDtype(StrEnum):
    """Names the dtype of floating-point weights."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


Target = Annotated[
    Path, typer.Argument(metavar="DST", help="The folder to create.", show_default=False)
]
VerifyOption = Annotated[
    Verify | None,
    typer.Option(
        "--verify",
        help="logits: also compare the outputs of both models (default if the model fits in "
        "memory).",
        show_default=False,
    ),
]
DtypeOption = Annotated[
    ConvertDtype | None,
    typer.Option(
        "--dtype", help="Number format of the weights; unchanged by default.", show_default=False
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Show the mapping, sizes, disk space and time; write nothing."),
]


EXAMPLES = [
    "miles convert hf-to-megatron Qwen/Qwen3-0.6B qwen3-megatron",
    "miles convert hf-to-megatron ./model out --dry-run",
]
PAGE = """\
miles convert: convert weights exactly between two formats

  miles convert hf-to-megatron SRC DST    a Hugging Face folder or hub name -> a checkpoint that
                                          Megatron-Core loads under any layout
  miles convert megatron-to-hf SRC DST    a checkpoint of any layout, or a run -> a Hugging Face
                                          folder

Both commands stream the weights, verify the result, and continue after an interruption; --dry-run
shows what they would do.
"""


GROUP = Group(
    "convert", about="Convert Hugging Face folders to Megatron checkpoints, and back.", page=PAGE
)


@verb("hf-to-megatron", examples=EXAMPLES, group=GROUP)
def hf_to_megatron(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A Hugging Face folder, or a name on the hub.", show_default=False
        ),
    ],
    target: Target,
    *,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")
    ] = None,
    dtype: DtypeOption = None,
    verify: VerifyOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Write a torch_dist checkpoint that stock Megatron-Core can load under any layout."""
    from milescli.conversion.to_megatron import ToMegatron

    direction = ToMegatron(source=source, revision=revision, dtype=dtype and dtype.value)
    _carry_out(direction, target, verify=verify, dry_run=dry_run, output=context.obj)


BACK_EXAMPLES = [
    "miles convert megatron-to-hf qwen3-megatron qwen3-hf",
    "miles convert megatron-to-hf runs/quickstart-1/checkpoints/step_20 out --max-shard-size 2GB",
    "miles convert megatron-to-hf iter_0000100 out --model Qwen/Qwen3-0.6B",
]


@verb("megatron-to-hf", examples=BACK_EXAMPLES, group=GROUP)
def megatron_to_hf(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint, a converted model, or a run (or one of its steps).",
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
        int | None,
        typer.Option("--step", min=0, help="Step of a run to convert; the newest by default."),
    ] = None,
    dtype: DtypeOption = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            help="Size of each file, such as 5GB or 500MB; as in the original model by default.",
        ),
    ] = None,
    verify: VerifyOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Write a Hugging Face folder that transformers and SGLang can load."""
    shard_bytes = _size(max_shard_size)
    from milescli.conversion.to_hf import ToHf

    direction = ToHf(
        source=source, model=model, step=step, dtype=dtype and dtype.value, shard_bytes=shard_bytes
    )
    _carry_out(direction, target, verify=verify, dry_run=dry_run, output=context.obj)


def _carry_out(
    direction: Direction, target: Path, *, verify: Verify | None, dry_run: bool, output: Output
) -> None:
    """Convert, or show what would be converted."""
    from milescli.commands.show.convert import show_conversion, show_preview
    from milescli.conversion.convert import convert
    from milescli.conversion.report import preview

    if dry_run:
        show_preview(preview(direction, target, output=output), output=output)
    else:
        done = convert(direction, target, command=typed_command(), verify=verify, output=output)
        show_conversion(done, output=output)


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-shard-size") from None
