"""`miles compare`: two runs side by side, or two recipes over several seeds; `miles report` writes
the former to a file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from typer.core import TyperCommand

from milescli.commands import suggest
from milescli.commands.find_run import find_run
from milescli.commands.options import verb
from milescli.commands.report import report
from milescli.console.output import Output

EXAMPLES = [
    "miles compare before after",
    "miles compare before after --json",
    "miles compare --json a1 a2 a3 -- b1 b2 b3",
]


class _Sides(TyperCommand):
    """Passes the runs after `--` as `--against`: click would join both sides."""

    def parse_args(self, context: typer.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args = [*args[:at], *(f"--against={run}" for run in args[at + 1 :])]
        return super().parse_args(context, args)


@verb("compare", examples=EXAMPLES, is_page=True, cls=_Sides)
def compare(
    context: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUNS",
            help="Two runs; or the runs of two recipes, with several seeds each.",
            autocompletion=suggest.runs,
            show_default=False,
        ),
    ],
    *,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="B1",
            help="A run of recipe B, as after `--`; repeatable.",
            autocompletion=suggest.runs,
        ),
    ] = None,
) -> None:
    """Compare two runs, or two recipes over several seeds: which settings differ, and which one
    learns better."""
    if not against:
        if len(runs) != 2:
            raise typer.BadParameter("name two runs, or several on each side of `--`")
        report(context, *runs)
        return
    from milescli.checkpoint.run_dir import open_run
    from milescli.report.sides import COLUMNS, compare_sides, rows
    from milescli.report.subject import read_subject

    output: Output = context.obj
    sides = (
        [read_subject(open_run(find_run(name))) for name in names] for names in (runs, against)
    )
    compared = compare_sides(*sides)
    output.json("comparison", asdict(compared))
    for letter, names in (("A", compared.a_runs), ("B", compared.b_runs)):
        output.text(f"{letter}: {', '.join(names)}")
    output.table(COLUMNS, rows(compared))
    for measure in compared.measures:
        output.text(f"{measure.sentence}.")
    for note in compared.notes:
        output.warn(note)
