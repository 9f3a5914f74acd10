"""Reads what a sweep has found: the accuracy of each trial with its interval, the importance of
settings, the winner. Reads the ledger and the runs; writes the report and the winner's recipe."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.store import write_atomically
from milescli.core.private import without_paths
from milescli.core.units import format_few
from milescli.insight.case import LOSS, REWARD
from milescli.insight.reader import read_history
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.resolved import load_resolved, resolved_yaml
from milescli.recipe.sweep import Dimension
from milescli.report.evaluations import evaluations_of
from milescli.report.formats import INTERVAL, accuracy, interval, signature
from milescli.report.markdown import MARK, code, table, text
from milescli.rollout.evaluation.statistics import Estimate
from milescli.sweep.folder import SweepDir, Trial, TrialState
from milescli.sweep.importance import MIN_TRIALS, RELIABLE_TRIALS, Importance, importance_of
from milescli.sweep.planning import TrialPlanner

MAX_POINTS = 200
"""Largest number of points of a trial's curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Holds one trial, and the last evaluation of its run."""

    number: int
    run: str
    settings: Mapping[str, str]
    state: TrialState
    step: int | None
    """Step of the last evaluation; None if there is none."""
    accuracy: float | None
    interval: Estimate | None
    error: Mapping[str, Any]
    evaluations: Sequence[tuple[int, float]] = ()
    """(step, accuracy), ascending."""
    curve: Sequence[tuple[int, float]] = ()
    """(step, reward of rollout, or loss of rows), at most `MAX_POINTS` of them."""

    @property
    def is_comparable(self) -> bool:
        """Return True if it has an accuracy that counts in the comparison of settings."""
        ended = self.state in (TrialState.DONE, TrialState.STOPPED_EARLY)
        return ended and self.accuracy is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """Holds everything that a sweep has found so far."""

    name: str
    num_trials: int
    """Number of trials when all are done."""
    trials: Sequence[TrialResult]
    """The most accurate first; those that failed or run last."""
    importance: Importance | None
    winner: TrialResult | None
    """The most accurate trial that did all its steps; None if none did."""
    notes: Sequence[str]
    """Reasons that weaken the comparison."""
    dimensions: Sequence[Dimension] = ()
    """The searched settings."""

    def figures(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self)


def read_results(folder: SweepDir) -> SweepResult:
    """Read the results of a sweep, which may still be running."""
    found = [_result(folder, trial) for trial in folder.trials()]
    found.sort(key=lambda one: (not one.is_comparable, -(one.accuracy or 0.0), one.number))
    compared = [one for one in found if one.is_comparable]
    winner = next((one for one in compared if one.state is TrialState.DONE), None)
    return SweepResult(
        name=folder.name,
        num_trials=folder.sweep.num_trials,
        trials=found,
        importance=importance_of(
            folder.sweep.dimensions,
            [one.settings for one in compared],
            [one.accuracy or 0.0 for one in compared],
        ),
        winner=winner,
        notes=list(_notes(folder, compared, winner)),
        dimensions=folder.sweep.dimensions,
    )


def _result(folder: SweepDir, trial: Trial) -> TrialResult:
    run = folder.run_of(trial)
    history = read_history(run) if run.path.is_dir() else None
    shown = evaluations_of(run, history) if history is not None else []
    last = shown[-1] if shown else None
    points = []
    if history is not None:
        points = history.columns.points(LOSS if history.learns_from_rows else REWARD)
    return TrialResult(
        number=trial.number,
        run=trial.run_name,
        settings=trial.settings,
        state=trial.state,
        step=last.step if last else None,
        accuracy=last.accuracy if last else None,
        interval=last.interval if last else None,
        error=trial.error,
        evaluations=[(one.step, one.accuracy) for one in shown],
        curve=points[:: 1 + len(points) // MAX_POINTS],
    )


def _notes(
    folder: SweepDir, compared: Sequence[TrialResult], winner: TrialResult | None
) -> Iterator[str]:
    """Yield the reasons that weaken the comparison."""
    if len(compared) > 1 and len({one.accuracy for one in compared}) == 1:
        yield "all trials are equally accurate: the winner is the first, and may be any"
    if winner is not None and winner.interval is not None:
        low = winner.interval.low
        rivals = [
            one.run
            for one in compared
            if one is not winner
            and one.state is TrialState.DONE
            and one.interval is not None
            and one.interval.high >= low
        ]
        if rivals:
            yield (
                f"the winner's interval overlaps that of {format_few(rivals, 3)}: `miles compare` "
                "tests two runs on the same prompts"
            )
    if len(compared) > 1:
        yield (
            "the best of several trials is partly luck: evaluate the winner on prompts that the "
            "sweep did not use, or train it with other seeds"
        )
    if MIN_TRIALS <= len(compared) < RELIABLE_TRIALS:
        yield f"with less than {RELIABLE_TRIALS} trials the order of importances is uncertain"
    if any(one.state is TrialState.STOPPED_EARLY for one in compared):
        yield "trials that stopped early count with the accuracy of an earlier step"
    if folder.sweep.settings.scheduler == "pbt" and winner is not None:
        yield "the winner's settings are those of its last part: see `forked from` in its report"


def write_results(folder: SweepDir, result: SweepResult) -> None:
    """Write the report, and the winner's recipe, which `miles launch` takes."""
    write_atomically(folder.report_file, markdown(result, folder))
    if result.winner is None:
        return
    planner = TrialPlanner(sweep=folder.sweep, recipe=folder.recipe, cwd=folder.cwd)
    loaded = _with_length_of(folder, planner.load(result.winner.settings, name=None), result.winner)
    head = (
        f"# Trial {result.winner.run} of the sweep {folder.name}: {_result_text(result.winner)}\n"
    )
    write_atomically(folder.winner_file, head + resolved_yaml(loaded))


def _with_length_of(folder: SweepDir, loaded: LoadedRecipe, winner: TrialResult) -> LoadedRecipe:
    """Return the recipe with the trial's number of steps in place of epochs."""
    train = loaded.recipe.train
    if train.epochs is None:
        return loaded
    run = RunDir(folder.path.parent / winner.run)
    steps = load_resolved(run.recipe_file).recipe.train.steps
    trained = train.model_copy(update={"steps": steps, "epochs": None})
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"train": trained}))


def _result_text(one: TrialResult) -> str:
    text = f"accuracy {accuracy(one.accuracy)}"
    return f"{text} ({interval(one.interval)})" if one.interval is not None else text


def rows_of(result: SweepResult) -> tuple[list[str], list[list[object]]]:
    """Return the columns and rows of the table of trials."""
    searched = [*dict.fromkeys(key for one in result.trials for key in one.settings)]
    rows: list[list[object]] = [
        [
            one.run,
            *(one.settings.get(key, "") for key in searched),
            accuracy(one.accuracy),
            interval(one.interval),
            str(one.step) if one.step is not None else "-",
            f"{one.state}: {one.error.get('error')}" if one.error else str(one.state),
        ]
        for one in result.trials
    ]
    return ["trial", *searched, "accuracy", INTERVAL, "at step", "state"], rows


def headline(result: SweepResult) -> str:
    """Return the result in one sentence."""
    ended = sum(one.is_comparable for one in result.trials)
    if result.winner is None:
        return (
            f"{ended} of {result.num_trials} trials have an accuracy; none has done all its steps"
        )
    settings = ", ".join(f"{key} {value}" for key, value in result.winner.settings.items())
    winner = result.winner
    return f"best of {ended} trials: {winner.run} with {settings}, {_result_text(winner)}"


def page_fields(result: SweepResult, folder: SweepDir) -> dict[str, Any]:
    """Return the fields of the sweep's HTML page besides the runs of its trials."""
    trials = [
        {**asdict(one), "state": str(one.state), "is_comparable": one.is_comparable}
        for one in result.trials
    ]
    return {
        "name": result.name,
        "headline": headline(result),
        "notes": result.notes,
        "dimensions": [asdict(one) for one in result.dimensions],
        "importance": asdict(result.importance) if result.importance is not None else None,
        "trials": trials,
        "winner": result.winner.run if result.winner is not None else None,
        "command": folder.launch_winner,
    }


def markdown(result: SweepResult, folder: SweepDir) -> str:
    """Return the report of a sweep."""
    head, rows = rows_of(result)
    cells = [[text(str(cell)) for cell in row] for row in rows]
    parts = [MARK, f"## Sweep {text(result.name)}", f"**{text(headline(result))}**"]
    parts.append("\n".join(f"- {text(note)}" for note in result.notes))
    parts.append(table([text(one) for one in head], cells))
    if result.importance is not None:
        found = [[code(key), f"{share:.2f}"] for key, share in result.importance.by_key.items()]
        method = f"{result.importance.method}, {result.importance.num_trials} trials"
        parts.append(table(["importance", method], found))
    for one in result.trials:
        if one.error:
            error_text = without_paths(f"{one.error.get('error')}; {one.error.get('why')}")
            parts.append(f"{text(one.run)} {one.state}: {text(error_text)}")
    if result.winner is not None:
        parts.append(f"Train the winner again: `{folder.launch_winner}`")
    return "\n\n".join(part for part in [*parts, signature(time.time())] if part) + "\n"
