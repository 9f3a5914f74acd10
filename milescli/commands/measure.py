"""What `miles eval` was given -> the function of the runtime that measures it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from milescli.commands.find_run import Measured, find_measured, runs_folder
from milescli.commands.show_eval import show_results
from milescli.console.output import Output
from milescli.core.errors import DataError
from milescli.runtime.evaluation.results import (
    SetResult,
    folder_of_endpoint,
    kept_result,
    read_result,
)
from milescli.runtime.evaluation.sets import EvalWish, set_names

if TYPE_CHECKING:
    from milescli.runtime.evaluation.evaluate import Ask

FOLDER = "evaluations"
"""Below the folder of runs: where results of what is no run go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Beside the wish."""

    steps: str | None = None
    """Of a run's checkpoints."""
    out: Path | None = None
    """Where `eval/` goes, of what is no run."""
    ask: Ask | None = None
    """What else is done with the engines than to measure; None: nothing. Of no endpoint."""


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
        from milescli.runtime.evaluation.evaluate import evaluate_run

        results = evaluate_run(
            found.run,
            steps=steps,
            wish=wish,
            environ=os.environ,
            output=output,
            ask=options.ask,
        )
        return found.run, results
    if options.steps is not None:
        raise typer.BadParameter(f"--step and --steps are of a run, and `{subject}` is none")
    if found.endpoint is not None:
        from milescli.runtime.evaluation.endpoint import evaluate_endpoint

        return evaluate_endpoint(
            found.endpoint,
            folder=options.out,
            runs=_evaluations(),
            wish=wish,
            environ=os.environ,
            output=output,
        )
    from milescli.runtime.evaluation.evaluate import evaluate_model

    assert found.model is not None, found
    folder = options.out or _evaluations() / Path(found.model).name
    return folder, evaluate_model(
        found.model,
        folder=folder,
        wish=wish,
        environ=os.environ,
        output=output,
        ask=options.ask,
    )


def against(other: str, wish: EvalWish, *, output: Output) -> EvalWish:
    """The same, to be compared with another model's results: those of a file, or what `miles eval`
    kept of a run, a checkpoint, a model or an endpoint; where it kept none of a set, the other is
    measured now, and shown. Raises MilesError."""
    if other.endswith(".json"):
        return replace(wish, against=[read_result(Path(other).expanduser())])
    found = find_measured(other)
    folder = found.run or _kept_folder(found, other)
    kept = [
        kept_result(folder, name, step=found.step) if folder else None for name in set_names(wish)
    ]
    if all(kept):
        return replace(wish, against=[one for one in kept if one])
    output.note(f"{other} was not asked this before: it is measured first")
    where, results = measured(other, wish, Options(), output=output)
    show_results(results, folder=where, output=output)
    return replace(wish, against=results)


def _kept_folder(found: Measured, name: str) -> Path | None:
    """Of what is no run: where its results are; None where there are none. Raises DataError where
    an endpoint has several models."""
    if found.model is not None:
        return _evaluations() / Path(found.model).name
    folder = folder_of_endpoint(name, _evaluations())
    models = sorted(folder.iterdir()) if folder.is_dir() else []
    if len(models) > 1:
        raise DataError(
            f"which model at {name} is it compared with?",
            why=f"results of {', '.join(model.name for model in models)} are in {folder}",
            fix=[f"--against {model}/eval/SET/step_0.json" for model in models],
        )
    return models[0] if models else None


def _evaluations() -> Path:
    return runs_folder(environ=os.environ, cwd=Path.cwd(), home=Path.home()) / FOLDER
