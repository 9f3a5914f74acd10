"""Sweeps of trials that are made up: who runs, stops and goes on; and what a sweep has found."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.commands.show import sweep as shown_sweep
from milescli.commands.show.sweep import report_sweep
from milescli.console.output import Mode, Output
from milescli.core.errors import CheckpointError, MilesError, RecipeError, Stopped
from milescli.recipe.load import load
from milescli.runtime import fork as forking
from milescli.sweep import running
from milescli.sweep.folder import SweepDir, Trial, TrialState, create_sweep, open_sweep
from milescli.sweep.results import headline, markdown, read_results, write_results
from milescli.sweep.running import run_sweep
from milescli.sweep.trial_process import remove_unstarted
from tests.sweep.conftest import STEPS, ToyTrial

QUIET = Output(Mode.QUIET)
NewSweep = Callable[[str], SweepDir]


def rises(trial: Trial, step: int) -> float:
    """Trial 3 of 4 is the best, trial 1 the worst."""
    return (0.1, 0.3, 0.9, 0.5)[trial.number - 1] * step / STEPS


def test_every_trial_runs_and_the_best_recipe_can_be_launched(
    toys: type[ToyTrial], new_sweep: NewSweep
) -> None:
    toys.accuracy = staticmethod(rises)
    folder = new_sweep("trials: 4")
    trials = run_sweep(folder, output=QUIET)
    assert [one.state for one in trials] == [TrialState.DONE] * 4
    assert [name for name, _ in toys.started] == ["lr-1", "lr-2", "lr-3", "lr-4"]
    result = read_results(folder)
    assert result.winner is not None and result.winner.number == 3
    assert [one.number for one in result.trials] == [3, 4, 2, 1]
    write_results(folder, result)
    assert "lr-3" in headline(result) and headline(result) in markdown(result, folder)
    winner = load(str(folder.winner_file), environ={}, cwd=folder.path, home=folder.path)
    assert winner.recipe.train.optimizer.lr == float(trials[2].settings["train.optimizer.lr"])
    assert (winner.recipe.train.steps, winner.recipe.run.name) == (STEPS, None)
    assert result.importance is not None and result.notes


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_a_sweep_that_was_stopped_keeps_what_is_done_and_continues_the_rest(
    toys: type[ToyTrial], new_sweep: NewSweep, searcher: str
) -> None:
    def until_ctrl_c(trial: Trial, step: int) -> float:
        if trial.number == 2 and step == 6:
            raise KeyboardInterrupt
        return 0.5

    toys.accuracy = staticmethod(until_ctrl_c)
    folder = new_sweep(f"trials: 3\nsearcher: {searcher}")
    with pytest.raises(Stopped) as stopped:
        run_sweep(folder, output=QUIET)
    assert stopped.value.fixes == [f"miles resume {folder.shown}"]
    before = folder.trials()
    assert [one.state for one in before] == [TrialState.DONE, TrialState.STOPPED]
    toys.accuracy = staticmethod(lambda trial, step: 0.5)
    toys.started.clear()
    again = open_sweep(folder.path)
    assert again.sweep.name == "lr"
    trials = run_sweep(again, output=QUIET)
    assert [one.state for one in trials] == [TrialState.DONE] * 3
    assert [one.settings for one in trials[:2]] == [one.settings for one in before]
    assert [(name, words[0]) for name, words in toys.started] == [
        ("lr-2", "resume"),
        ("lr-3", "launch"),
    ]
    assert len({one.settings["train.optimizer.lr"] for one in trials}) == 3


def test_a_scheduler_stops_trials_early_and_none_of_them_wins(
    toys: type[ToyTrial], new_sweep: NewSweep
) -> None:
    toys.accuracy = staticmethod(lambda trial, step: (0.5, 0.2, 0.1, 0.9)[trial.number - 1])
    folder = new_sweep("trials: 4\nscheduler: asha")
    trials = run_sweep(folder, output=QUIET)
    early, done = TrialState.STOPPED_EARLY, TrialState.DONE
    assert [one.state for one in trials] == [done, early, early, done]
    assert [one.state for one in folder.trials()] == [done, early, early, done]
    toys.started.clear()
    assert [one.state for one in run_sweep(folder, output=QUIET)] == [done, early, early, done]
    assert not toys.started
    result = read_results(folder)
    assert result.winner is not None and result.winner.number == 4
    assert any("stopped early" in note for note in result.notes)


def test_a_trial_that_fails_is_shown_and_ends_no_sweep(
    toys: type[ToyTrial], new_sweep: NewSweep
) -> None:
    def fails(trial: Trial, step: int) -> float:
        if trial.number == 1:
            raise ChildProcessError("the loss is NaN")
        return 0.5

    toys.accuracy = staticmethod(fails)
    folder = new_sweep("trials: 2")
    assert [str(one.state) for one in run_sweep(folder, output=QUIET)] == ["failed", "done"]
    assert "the loss is NaN" in markdown(read_results(folder), folder)


def test_a_sweep_fails_if_all_its_trials_do(toys: type[ToyTrial], new_sweep: NewSweep) -> None:
    def fails(trial: Trial, step: int) -> float:
        raise ChildProcessError("the loss is NaN")

    toys.accuracy = staticmethod(fails)
    with pytest.raises(MilesError, match="all 2 trials") as failed:
        run_sweep(new_sweep("trials: 2"), output=QUIET)
    assert "the loss is NaN" in failed.value.why and "mend it" in failed.value.fixes


def test_a_trial_that_cannot_run_is_left_out(toys: type[ToyTrial], new_sweep: NewSweep) -> None:
    toys.accuracy = staticmethod(rises)
    text = "searcher: grid\nsearch: {train.algorithm: {grid: [grpo, grqo]}}"
    folder = new_sweep("trials: 2")
    (folder.path / "sweep.yaml").write_text(f"recipe: quickstart\n{text}\n")
    trials = run_sweep(open_sweep(folder.path), output=QUIET)
    assert [str(one.state) for one in trials] == ["done", "refused"]
    again = run_sweep(open_sweep(folder.path), output=QUIET)
    assert [str(one.state) for one in again] == ["done", "refused"]
    assert "grqo" in again[1].error["error"] and len(toys.started) == 1


def test_the_worst_of_a_population_goes_on_as_a_fork_of_the_best(
    toys: type[ToyTrial], new_sweep: NewSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks = list[tuple[str, str]]()

    def fork(path, *, step, name, steps, sets, output):  # type: ignore[no-untyped-def]
        """A copy, which has no events of its own."""
        run = RunDir(path.parent / name)
        run.path.mkdir()
        run.recipe_file.write_text((path / "recipe.yaml").read_text())
        forks.append((path.name, name))
        return forking.Fork(
            run=run, step=3, num_steps=STEPS, changed=[], linked_bytes=0, copied_bytes=0
        )

    monkeypatch.setattr(running, "fork", fork)
    toys.accuracy = staticmethod(rises)
    folder = new_sweep("trials: 4\nscheduler: pbt\nrung_steps: 6")
    trials = run_sweep(folder, output=QUIET)
    assert [one.state for one in trials] == [TrialState.DONE] * 4
    assert forks == [("lr-3", "lr-1-2")]
    assert (trials[0].run_name, trials[0].earlier_runs) == ("lr-1-2", ["lr-1"])
    assert folder.trials()[0].settings == trials[0].settings != trials[2].settings


def test_a_ledger_that_is_torn_or_foreign_is_read_as_far_as_it_is_sound(
    new_sweep: NewSweep,
) -> None:
    folder = new_sweep("trials: 3")
    ledger = folder.path / "trials.jsonl"
    folder.record(Trial(number=1, settings={}, run_name="lr-1", state=TrialState.DONE))
    outside = Trial(number=2, settings={}, run_name="../../elsewhere")
    folder.record(outside)
    with ledger.open("a") as file:
        file.write('\n{"number": 3, "set')
    folder.record(Trial(number=3, settings={}, run_name="lr-3"))
    assert [(one.number, str(one.state)) for one in folder.trials()] == [
        (1, "done"),
        (3, "waiting"),
    ]


def test_a_folder_of_others_with_the_name_of_a_trial_is_left_alone(
    toys: type[ToyTrial], new_sweep: NewSweep
) -> None:
    folder = new_sweep("trials: 1")
    theirs = folder.path.parent / "lr-1"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    remove_unstarted(RunDir(theirs))
    assert (theirs / "notes.txt").read_text() == "mine"
    (theirs / "notes.txt").rename(theirs / ".lock")
    remove_unstarted(RunDir(theirs))
    assert not [*theirs.iterdir()]


def test_an_existing_sweep_or_trial_is_never_overwritten(
    toys: type[ToyTrial], new_sweep: NewSweep
) -> None:
    folder = new_sweep("trials: 2")
    with pytest.raises(RecipeError, match="already exists") as refused:
        new_sweep("trials: 2")
    assert refused.value.fixes[0].startswith(f"miles resume {folder.shown}")
    other = folder.path.parent / "other-2"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    file = folder.path.parent / "other.yaml"
    file.write_text((folder.path / "sweep.yaml").read_text())
    from milescli.recipe.sweep import read_sweep

    with pytest.raises(RecipeError, match="other-2"):
        create_sweep(
            read_sweep(file),
            environ={"MILES_RUN__DIR": str(folder.path.parent)},
            cwd=folder.path.parent,
            home=folder.path.parent,
        )


def test_a_sweep_is_a_page_with_the_runs_of_its_best_trials(
    toys: type[ToyTrial], new_sweep: NewSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toys.accuracy = staticmethod(rises)
    folder = new_sweep("trials: 4")
    page = tmp_path / "sweep.html"
    with pytest.raises(CheckpointError, match="has begun no trial yet"):
        report_sweep(folder.path, to=page, force=False, output=QUIET)
    run_sweep(folder, output=QUIET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shown_sweep, "RUNS_OF_PAGE", 2)
    report_sweep(folder.path, to=page, force=False, output=QUIET)
    text = page.read_text()
    saved = json.loads(re.search(r'id="saved">(.*?)</', text)[1])
    assert [one["id"] for one in saved["runs"]] == ["lr-3", "lr-4"] == [*saved["answers"]]
    sweep = saved["sweep"]
    assert sweep["winner"] == "lr-3" and sweep["headline"] == headline(read_results(folder))
    assert sweep["command"] == "miles launch runs/lr/winner.yaml"
    assert [one["run"] for one in sweep["trials"]] == ["lr-3", "lr-4", "lr-2", "lr-1"]
    best = sweep["trials"][0]
    assert best["evaluations"] == [[3 * n, pytest.approx(0.075 * 3 * n)] for n in range(5)]
    (dimension,) = sweep["dimensions"]
    assert (dimension["key"], dimension["kind"]) == ("train.optimizer.lr", "loguniform")
    assert sweep["importance"]["by_key"].keys() == {"train.optimizer.lr"}
    assert str(tmp_path) not in text


def test_a_sweep_that_may_only_be_read_is_reported_all_the_same(
    toys: type[ToyTrial],
    new_sweep: NewSweep,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    toys.accuracy = staticmethod(rises)
    folder = new_sweep("trials: 4")
    run_sweep(folder, output=QUIET)
    monkeypatch.chdir(tmp_path)

    def refused(path: Path, text: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("milescli.sweep.results.write_atomically", refused)
    report_sweep(folder.path, to=None, force=False, output=Output(Mode.HUMAN))
    said = capsys.readouterr()
    assert "lr-3" in said.out and "nothing was written to runs/lr: Permission denied" in said.err
    report_sweep(folder.path, to=tmp_path / "sweep.md", force=False, output=QUIET)
    assert "lr-3" in (tmp_path / "sweep.md").read_text()
