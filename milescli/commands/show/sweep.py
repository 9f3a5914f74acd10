"""Shows a sweep on the screen and as JSON: its trials before they run, and what they found."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from pathlib import Path

from milescli.checkpoint.run_dir import RunDir
from milescli.commands.show.plan import cost
from milescli.console.output import Output
from milescli.core.errors import CheckpointError
from milescli.core.units import format_bytes
from milescli.recipe.sweep import Sweep
from milescli.report import make
from milescli.report.subject import read_subject
from milescli.sweep.folder import SweepDir, open_sweep
from milescli.sweep.planning import PlannedTrial
from milescli.sweep.results import (
    SweepResult,
    headline,
    markdown,
    page_fields,
    read_results,
    rows_of,
    write_results,
)

RUNS_OF_PAGE = 6
"""Number of the best trials whose whole runs an HTML report contains."""


def show_planned(
    sweep: Sweep, planned: Sequence[PlannedTrial], *, price: float | None, output: Output
) -> None:
    """Show the trials that would run, and those that cannot."""
    output.json(
        "sweep_plan",
        {
            "name": sweep.name,
            "trials": [
                {
                    "trial": one.number,
                    "settings": one.settings,
                    "fits": one.refusal is None,
                    "error": one.refusal.as_dict() if one.refusal is not None else None,
                    "memory_bytes": one.memory_bytes,
                    "gpu_hours": one.gpu_hours,
                    "cost": _cost(one, price),
                }
                for one in planned
            ],
        },
    )
    searched = [one.key for one in sweep.dimensions]
    rows = [
        [
            f"{sweep.name}-{one.number}",
            *(one.settings[key] for key in searched),
            "yes" if one.refusal is None else f"no: {one.refusal.what}",
            format_bytes(one.memory_bytes) if one.memory_bytes else "-",
            *([f"{one.gpu_hours:,.1f}"] if one.gpu_hours is not None else ["-"]),
            *([f"{_cost(one, price):,.0f}"] if _cost(one, price) is not None else ["-"]),
        ]
        for one in planned
    ]
    columns = ["trial", *searched, "fits", "memory", "GPU-hours", "cost"]
    output.table(columns, rows, title=f"{sweep.num_trials} trials of {sweep.settings.recipe}")
    output.blank()
    hours = [one.gpu_hours for one in planned if one.gpu_hours is not None]
    if hours:
        whole = f"{sum(hours):,.1f} GPU-hours"
        whole += f", {sum(hours) * price:,.0f} at {price:g} each" if price is not None else ""
        output.note(f"all trials: {whole}, if none stops early; predicted, not measured")
    if len(planned) < sweep.num_trials:
        output.note(f"{len(planned)} first draws: the others depend on the results of these")
    if refused := [one for one in planned if one.refusal is not None]:
        output.warn(f"{len(refused)} of {len(planned)} trials cannot run, and would be left out")
        assert refused[0].refusal is not None
        output.error(refused[0].refusal)
    output.note("nothing was started")


def _cost(one: PlannedTrial, price: float | None) -> float | None:
    forecast = one.plan.forecast if one.plan is not None else None
    return cost(forecast, price) if forecast is not None and price is not None else None


def show_results(folder: SweepDir, result: SweepResult, *, output: Output) -> None:
    """Show what a sweep found, and the next commands."""
    output.json(
        "sweep",
        {
            "path": str(folder.path),
            "winner_recipe": str(folder.winner_file) if result.winner is not None else None,
            **result.figures(),
        },
    )
    columns, rows = rows_of(result)
    output.table(columns, rows, title=f"sweep {result.name}")
    output.blank()
    if result.importance is not None:
        output.table(
            ["setting", "importance"],
            [[key, f"{value:.2f}"] for key, value in result.importance.by_key.items()],
            title=f"by {result.importance.method}, {result.importance.num_trials} trials",
        )
        output.blank()
    (output.success if result.winner is not None else output.note)(headline(result))
    for note in result.notes:
        output.note(note)
    if result.winner is not None:
        run = RunDir(folder.path.parent / result.winner.run).typed
        output.next_steps(
            {
                folder.launch_winner: "train with the best settings",
                f"miles report {run}": "read about it",
                f"miles report {folder.typed} --to sweep.html": "the page to share",
            }
        )


def report_sweep(path: Path, *, to: Path | None, force: bool, output: Output) -> None:
    """Show the report of a sweep, or write it to a file. Raises CheckpointError for a page of a
    sweep that has started no trial."""
    folder = open_sweep(path)
    result = read_results(folder)
    try:
        write_results(folder, result)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        output.warn(f"nothing was written to {folder.shown}: {error.strerror}")
    if to is None:
        show_results(folder, result, output=output)
        return
    made = _page(folder, result) if make.is_html(to) else markdown(result, folder)
    make.write(to, made, force=force)
    output.json("report", {"path": str(to), **result.figures()})
    output.success(f"{to}: {headline(result)}")


def _page(folder: SweepDir, result: SweepResult) -> str:
    from milescli.web.saved import sweep_page

    runs = [RunDir(folder.path.parent / one.run) for one in result.trials]
    subjects = [read_subject(run) for run in runs if run.is_run][:RUNS_OF_PAGE]
    if not subjects:
        raise CheckpointError(
            f"the sweep {folder.name} has begun no trial yet",
            why="an HTML report shows the runs of trials",
            fix=f"miles resume {folder.typed}   # begins them",
        )
    return sweep_page(page_fields(result, folder), subjects, made_s=time.time())
