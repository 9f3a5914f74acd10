"""`miles convert`: Hugging Face folders to Megatron checkpoints and back, each with its proof."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands import convert_back
from milescli.commands.command_line import typed
from milescli.commands.convert_options import DryRunOption, DtypeOption, Target, VerifyOption
from milescli.commands.options import verb
from milescli.console.output import Output

EXAMPLES = [
    "miles convert hf-to-megatron Qwen/Qwen3-0.6B qwen3-megatron",
    "miles convert hf-to-megatron ./model out --dry-run",
]
PAGE = """\
miles convert: weights from one form into the other, exactly

  miles convert hf-to-megatron SRC DST    a Hugging Face folder or hub name -> a checkpoint that
                                          Megatron-Core loads under any layout
  miles convert megatron-to-hf SRC DST    a checkpoint of any layout, or a run -> a Hugging Face
                                          folder

Both stream, check themselves, and go on where they were interrupted; --dry-run shows what they
would do.
"""


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Turn Hugging Face folders into Megatron checkpoints, and back.")
    group.callback(invoke_without_command=True)(page)
    verb(group, "hf-to-megatron", examples=EXAMPLES)(hf_to_megatron)
    convert_back.register(group)
    app.add_typer(group, name="convert")


def page(context: typer.Context) -> None:
    """Turn Hugging Face folders into Megatron checkpoints, and back."""
    if context.invoked_subcommand is None:
        context.obj.text(PAGE)


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
    """Write a torch_dist checkpoint that stock Megatron-Core loads under any layout."""
    from milescli.commands.show_convert import show_conversion, show_preview
    from milescli.conversion.convert import convert
    from milescli.conversion.preview import preview
    from milescli.conversion.to_megatron import ToMegatron

    output: Output = context.obj
    direction = ToMegatron(source=source, revision=revision, dtype=dtype and dtype.value)
    if dry_run:
        show_preview(preview(direction, target, output=output), output=output)
    else:
        done = convert(direction, target, command=typed(), verify=verify, output=output)
        show_conversion(done, output=output)
