"""Evaluates the subject of `miles eval` with the runtime's function for its kind, and shows the
results."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from milescli.checkpoint.run_dir import RunDir
from milescli.commands.find_run import EvalTarget, find_eval_target, runs_folder
from milescli.commands.options import fixes_in_words_of
from milescli.console import theme
from milescli.console.columns import percent
from milescli.console.output import Output
from milescli.core.errors import DataError, FitError
from milescli.core.units import format_duration
from milescli.plan.engines_alone import REMOTE_SERVER_FIX
from milescli.rollout.evaluation.statistics import LEVEL, Estimate
from milescli.runtime.evaluation.results import (
    Comparison,
    SetResult,
    find_result,
    folder_of,
    folder_of_endpoint,
    folder_of_model,
    is_older_than_model,
    read_result,
    read_results,
)
from milescli.runtime.evaluation.sets import EvalOptions, set_names

if TYPE_CHECKING:
    from milescli.runtime.evaluation.evaluate import EngineUse


_CURVE_WIDTH = 40


def show_results(results: Sequence[SetResult], *, folder: Path, output: Output) -> None:
    """Show the results of each set. `folder` contains `eval/`: the run's, or the one that was made
    for it."""
    for result in results:
        fields = asdict(result)
        del fields["rewards"]
        output.json("eval", {"run": str(folder), "fingerprint": result.fingerprint, **fields})
    names = list(dict.fromkeys(name for result in results for name in result.estimates))
    output.table(
        ["step", "set", "prompts", *names, "truncated", "tokens", "took"],
        [
            [
                result.step,
                result.set,
                result.num_prompts,
                *(_shown(result.estimates.get(name)) for name in names),
                f"{result.truncated_fraction:.1%}",
                _tokens(result),
                format_duration(result.seconds),
            ]
            for result in results
        ],
        title=f"evaluation of {results[0].model} (in brackets: {LEVEL:.0%} interval)",
    )
    _show_domains(results, output)
    _show_curves(results, folder, output)
    output.note(f"samples and results: {folder / Path(results[-1].path).parent}")


def show_comparisons(comparisons: Sequence[Comparison], *, output: Output) -> None:
    """Show one sentence for each set."""
    output.blank()
    for one in comparisons:
        output.json("comparison", asdict(one))
        output.text(f"{one.set}: {one.sentence}")
        if one.other_settings:
            output.warn(
                f"{one.set}: the two were evaluated with different settings: "
                f"{', '.join(one.other_settings)}"
            )


def _shown(estimate: Estimate | None) -> str | None:
    """Format an estimate: `61.2% (58.1 to 64.2)`, or `2.412 (2.211 to 2.613)` for rewards that are
    not shares."""
    if estimate is None:
        return None
    ends = estimate.low, estimate.high
    is_share = 0.0 <= estimate.value <= 1.0
    low, high = (f"{100 * end:.1f}" if is_share else f"{end:.3f}" for end in ends)
    return f"{percent(estimate.value)} ({low} to {high})"


def _tokens(result: SetResult) -> str | None:
    mean = result.response_tokens_mean
    return None if mean is None else f"{mean:.0f}"


def _show_domains(results: Sequence[SetResult], output: Output) -> None:
    rows = [
        [result.step, result.set, name, score.num_prompts, _shown(score.accuracy)]
        for result in results
        for name, score in result.domains.items()
    ]
    if rows:
        output.blank()
        output.table(["step", "set", "domain", "prompts", "accuracy"], rows, title="by domain")


def _show_curves(results: Sequence[SetResult], folder: Path, output: Output) -> None:
    """Show the values by step of each set that was evaluated with the same settings at several
    steps, now or earlier."""
    rows = []
    for latest in {result.set: result for result in results}.values():
        stored = read_results(folder / "eval", folder_of(latest.set))
        points = [one for one in stored if one.fingerprint == latest.fingerprint]
        if len(points) > 1:
            curve = theme.sparkline([one.accuracy for one in points], _CURVE_WIDTH)
            first, last = points[0], points[-1]
            change = (
                f"{percent(first.accuracy)} at step {first.step}, "
                f"{percent(last.accuracy)} at {last.step}"
            )
            rows.append([latest.set, curve, change])
    if rows:
        output.blank()
        output.table(["set", "curve", "accuracy"], rows, title="over steps")


FOLDER = "evaluations"
"""Folder, in the folder of runs, for results of models and endpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Holds the options that are not part of EvalOptions."""

    steps: str | None = None
    """Steps of a run's checkpoints."""
    out: Path | None = None
    """Folder for `eval/`, unless a run is measured."""
    use_engines: EngineUse | None = None
    """Uses the engines instead of an evaluation; None: evaluate. Must be None for an endpoint."""
    verb: str = "chat"
    """The verb of the command, for the fixes of errors."""


def measure_subject(
    subject: str, eval_options: EvalOptions, options: MeasureOptions, *, output: Output
) -> tuple[Path, list[SetResult]]:
    """Evaluate a subject. Return (the folder that contains `eval/`, the results). Raises
    MilesError; BadParameter for an option that belongs to another kind of subject."""
    try:
        return _measure_target(subject, eval_options, options, output=output)
    except FitError as error:
        if options.use_engines is None:
            raise
        fixes = _fixes_for_verb(error.fixes, options.verb)
        raise type(error)(error.what, why=error.why, fix=fixes) from None


_TOKENS = re.compile(r"--set rollout\.max_response_tokens=(\d+)")


def _fixes_for_verb(fixes: Sequence[str], verb: str) -> list[str]:
    """Return the fixes of an evaluation as `miles chat` and `miles serve` take them."""
    fixes_left = [
        fix.replace("miles eval", f"miles {verb}") for fix in fixes if fix != REMOTE_SERVER_FIX
    ]
    fixes_left = [_TOKENS.sub(r"--tokens \1", fix) for fix in fixes_left]
    return fixes_left or [f"miles {verb} Qwen/Qwen3-0.6B   # a smaller model"]


def _measure_target(
    subject: str, eval_options: EvalOptions, options: MeasureOptions, *, output: Output
) -> tuple[Path, list[SetResult]]:
    target = find_eval_target(subject)
    if target.run is not None:
        if options.out is not None:
            raise typer.BadParameter(
                "--out applies to a MODEL: results of a run are stored in the run's directory"
            )
        if target.step is not None and options.steps is not None:
            raise typer.BadParameter(
                f"`{subject}` names a checkpoint of a run, so --step and --steps cannot apply"
            )
        steps = options.steps if target.step is None else str(target.step)
        from milescli.runtime.evaluation.evaluate import evaluate_run

        verb = "eval" if options.use_engines is None else options.verb
        at = f"miles {verb} {RunDir(target.run.absolute()).typed}@"
        takes_step = target.step is None and options.use_engines is None
        with nullcontext() if takes_step else fixes_in_words_of(at, instead_of="--step "):
            results = evaluate_run(
                target.run,
                steps=steps,
                eval_options=eval_options,
                environ=os.environ,
                output=output,
                use_engines=options.use_engines,
            )
        return target.run, results
    if options.steps is not None:
        raise typer.BadParameter(f"--step and --steps apply to runs, and `{subject}` is not a run")
    if target.endpoint is not None:
        from milescli.runtime.evaluation.endpoint import evaluate_endpoint

        return evaluate_endpoint(
            target.endpoint,
            folder=options.out,
            runs=runs_folder() / FOLDER,
            eval_options=eval_options,
            environ=os.environ,
            output=output,
        )
    from milescli.runtime.evaluation.evaluate import evaluate_model

    assert target.model is not None, target
    folder = options.out or folder_of_model(target.model, runs_folder() / FOLDER)
    return folder, evaluate_model(
        target.model,
        folder=folder,
        eval_options=eval_options,
        environ=os.environ,
        output=output,
        use_engines=options.use_engines,
    )


def with_comparison(other: str, eval_options: EvalOptions, *, output: Output) -> EvalOptions:
    """Return the options with another model's results to compare with: those in a file, or those
    that `miles eval` stored for a run, a checkpoint, a model or an endpoint. If a set is missing
    there, evaluate the other model now and show its results. Raises MilesError."""
    if other.endswith(".json"):
        return replace(eval_options, against=[read_result(Path(other).expanduser())])
    target = find_eval_target(other)
    folder = target.run or _results_folder(target, other)
    names = set_names(eval_options)
    stored = [one for name in names if folder and (one := _stored_result(folder, name, target))]
    if len(stored) == len(names):
        return replace(eval_options, against=stored)
    output.note(f"{other} has no results for these prompts yet: evaluating it first")
    where, results = measure_subject(other, eval_options, MeasureOptions(), output=output)
    show_results(results, folder=where, output=output)
    return replace(eval_options, against=results)


def _stored_result(folder: Path, name: str, target: EvalTarget) -> SetResult | None:
    """Return the stored result of a set; None if there is none, or only one of older weights."""
    found = find_result(folder, name, step=target.step)
    is_old = found and target.model and is_older_than_model(found, folder, target.model)
    return None if is_old else found


def _results_folder(target: EvalTarget, name: str) -> Path | None:
    """Return the folder with the results of a model or an endpoint; None if there is none. Raises
    DataError if an endpoint has several models."""
    if target.model is not None:
        return folder_of_model(target.model, runs_folder() / FOLDER)
    folder = folder_of_endpoint(name, runs_folder() / FOLDER)
    models = sorted(folder.iterdir()) if folder.is_dir() else []
    if len(models) > 1:
        raise DataError(
            f"which model at {name} should the comparison use?",
            why=f"{folder} holds results of {', '.join(model.name for model in models)}",
            fix=[f"--against {model}/eval/SET/step_0.json" for model in models],
        )
    return models[0] if models else None
