"""What `miles eval` was given -> the function of the runtime that measures it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import typer

from milescli.commands.find_run import find_measured, runs_folder
from milescli.console.output import Output
from milescli.runtime.eval_records import SetResult
from milescli.runtime.eval_sets import EvalWish

FOLDER = "evaluations"
"""Below the folder of runs: where results of what is no run go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Beside the wish."""

    steps: str | None = None
    """Of a run's checkpoints."""
    out: Path | None = None
    """Where `eval/` goes, of what is no run."""


def measured(
    subject: str, wish: EvalWish, options: Options, *, output: Output
) -> tuple[Path, list[SetResult]]:
    """(the folder that `eval/` is in, the results). Raises MilesError; BadParameter where an option
    is of something else."""
    found = find_measured(subject)
    if found.run is not None:
        if options.out is not None:
            raise typer.BadParameter("--out is of a MODEL: results of a run are kept in the run")
        steps = options.steps if found.step is None else str(found.step)
        from milescli.runtime.evaluate import evaluate_run

        results = evaluate_run(found.run, steps=steps, wish=wish, environ=os.environ, output=output)
        return found.run, results
    if options.steps is not None:
        raise typer.BadParameter(f"--step and --steps are of a run, and `{subject}` is none")
    from milescli.runtime.evaluate_model import evaluate_model

    assert found.model is not None, found
    runs = runs_folder(environ=os.environ, cwd=Path.cwd(), home=Path.home())
    folder = options.out or runs / FOLDER / Path(found.model).name
    results = evaluate_model(
        found.model, folder=folder, wish=wish, environ=os.environ, output=output
    )
    return folder, results
