"""What `miles eval` was given -> the function of the runtime that measures it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from milescli.commands.find_run import find_measured, runs_folder
from milescli.console.output import Output
from milescli.runtime.eval_compare import kept_result
from milescli.runtime.eval_records import SetResult, read_result
from milescli.runtime.eval_sets import EvalWish, set_names

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
    folder = options.out or _own_folder(found.model)
    results = evaluate_model(
        found.model, folder=folder, wish=wish, environ=os.environ, output=output
    )
    return folder, results


def against(other: str, wish: EvalWish) -> EvalWish:
    """The same, to be compared with what `miles eval` kept of another model: its results by their
    file, or those of a run, a checkpoint or a model. Raises DataError where there are none."""
    if other.endswith(".json"):
        return replace(wish, against=[read_result(Path(other).expanduser())])
    found = find_measured(other)
    folder = found.run or _own_folder(other)
    kept = [kept_result(folder, name, step=found.step, model=other) for name in set_names(wish)]
    return replace(wish, against=kept)


def _own_folder(model: str) -> Path:
    runs = runs_folder(environ=os.environ, cwd=Path.cwd(), home=Path.home())
    return runs / FOLDER / Path(model).name
