"""`miles report`: a run as one file to show around, or two runs compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.find_run import find_run, find_sweep
from milescli.commands.options import RunArgument, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles report quickstart-1 --to report.html",
    "miles report quickstart-1 --to report.md",
    "miles report before after --to difference.html",
    "miles report quickstart-1 | gh pr comment 12 --body-file -",
]
_STDOUT = "-"


@verb("report", examples=EXAMPLES)
def report(
    context: typer.Context,
    run: RunArgument,
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN2",
            help="Another run to compare with.",
            autocompletion=suggest.runs,
            show_default=False,
        ),
    ] = None,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="FILE", help="FILE.html, FILE.md, or - for stdout (the default)."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a file that is not a report.")
    ] = False,
) -> None:
    """Write a report of a run as one file (verdict, curves, time, samples, recipe), or compare two
    runs in one."""
    from milescli.report import make
    from milescli.report.make import Report, compare_runs, report_run
    from milescli.report.markdown import compare_markdown, run_markdown
    from milescli.web.saved import compare_page, run_page

    output: Output = context.obj
    file = None if to is None or to == _STDOUT else Path(to).expanduser()
    if file is not None:
        if file.suffix.lower() not in (*make.HTML, *make.MARKDOWN):
            raise typer.BadParameter(f"`{file}` must end with .html or .md")
        make.require_writable(file, force=force)
    if other is None and (sweep := find_sweep(run)) is not None:
        from milescli.commands.show.sweep import report_sweep

        report_sweep(sweep, to=file, force=force, output=output)
        return
    folders = [find_run(name) for name in (run, other) if name is not None]
    html = file is not None and make.is_html(file)
    made: Report = (
        report_run(folders[0], form=run_page if html else run_markdown)
        if other is None
        else compare_runs(*folders, form=compare_page if html else compare_markdown)
    )
    if file is not None:
        make.write(file, made.text, force=force)
    output.json("report", {"path": None if file is None else str(file), **made.figures})
    if file is None:
        output.text(made.text)
        return
    output.success(f"{file}, {len(made.text.encode(errors='replace')) / 1000:.0f} kB")
    output.note(made.sentence)
