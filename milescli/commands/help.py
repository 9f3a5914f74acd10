"""`miles help`: pages that no option list can hold: exit codes, recipe keys, the run directory."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.checkpoint.run_dir import LAYOUT
from milescli.commands.options import verb
from milescli.console.output import Output
from milescli.core.errors import EXIT_CODE_MEANINGS, nearest

EXAMPLES = [
    "miles help exit-codes",
    "miles help recipe",
    "miles help recipe train.optimizer.lr",
    "miles help launch",
]

TOPICS = {
    "exit-codes": "what each exit code of miles means",
    "recipe": "every recipe key: type, default, meaning; or those of one section, or one key",
    "run-directory": "the files of runs/NAME",
}


@verb("help", examples=EXAMPLES, is_page=True)
def help_page(
    context: typer.Context,
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAGE|VERB]",
            help=f"{', '.join(TOPICS)}, or a verb.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY", help="With `recipe`: a key or a section.", show_default=False
        ),
    ] = None,
) -> None:
    """Show a help page (exit-codes, recipe or run-directory), or the help of a verb."""
    output: Output = context.obj
    if key is not None and topic != "recipe":
        raise typer.BadParameter("a key is only accepted after `recipe`: miles help recipe KEY")
    if topic == "exit-codes":
        codes = [(int(code), meaning) for code, meaning in EXIT_CODE_MEANINGS.items()]
        output.json(
            "exit_codes",
            {"exit_codes": [{"code": code, "meaning": meaning} for code, meaning in codes]},
        )
        output.table(["code", "meaning"], codes)
    elif topic == "recipe":
        from milescli.commands.show.listings import show_keys

        show_keys(output, within=key)
    elif topic == "run-directory":
        output.json("run_directory", {"files": LAYOUT})
        output.kv(LAYOUT, title="runs/NAME/")
    elif topic is None:
        output.json("help", {"topics": TOPICS})
        output.table(
            ["page", "content"],
            [(f"miles help {name}", text) for name, text in TOPICS.items()],
        )
    else:
        verbs = context.find_root().command
        if topic not in verbs.commands:  # type: ignore[attr-defined]
            guess = nearest(topic, [*TOPICS, *verbs.commands])  # type: ignore[attr-defined]
            hint = f"; nearest is `{guess}`" if guess else ""
            raise typer.BadParameter(f"`{topic}` is neither a help page nor a verb{hint}")
        verbs.main(args=[topic, "--help"], prog_name="miles", standalone_mode=False, obj=output)
